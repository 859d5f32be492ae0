"""Hosts with checkpoint parts on their disks: this one, or others over ssh. No torch."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from windlass.errors import BadInput
from windlass.model.formats.disk.atomic import write_errors
from windlass.tasks.train.checkpoint.gathering import PARTS

_FOLDER = re.compile(r"step-\d{8,}\.tmp")
_HOST = re.compile(r"[A-Za-z0-9_.@:\[\]-]+")
_HERE = frozenset({"localhost", "127.0.0.1", "::1"})


class CheckpointHost(Protocol):
    name: str

    def lists(self, local: Path) -> dict[str, bytes]:
        """`step-00000010.tmp/__3.parts.json` -> its content, of every rank that saved to `local` there."""
        ...

    def fetch(self, file: Path, into: Path) -> None: ...

    def remove(self, files: Iterable[Path], folder: Path) -> None:
        """The files, and the folder once it is empty."""
        ...


def read_hostfile(path: Path) -> list[CheckpointHost]:
    """One host per line, `host slots=8`, as for mpirun and DeepSpeed; duplicates count once."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read the hostfile {path}: {getattr(error, 'strerror', None) or error}") from None
    names: dict[str, None] = {}
    for number, line in enumerate(lines, start=1):
        fields = line.split("#")[0].split()
        if not fields:
            continue
        if not _HOST.fullmatch(fields[0]) or fields[0].startswith("-") or any("=" not in field for field in fields[1:]):
            raise BadInput(f"{path}, line {number}: expected `host slots=8`, found {line.strip()[:60]!r}")
        names[fields[0]] = None
    if not names:
        raise BadInput(f"{path} has no hosts; write one per line, as `host slots=8`")
    return [_host(name) for name in names]


def _host(name: str) -> CheckpointHost:
    return LocalHost(name) if name in _HERE or name == socket.gethostname() else SshHost(name)


class LocalHost:
    def __init__(self, name: str = "localhost") -> None:
        self.name = name

    def lists(self, local: Path) -> dict[str, bytes]:
        if not local.is_dir():
            return {}
        folders = (path for path in local.iterdir() if _FOLDER.fullmatch(path.name) and path.is_dir())
        found = (file for folder in folders for file in folder.iterdir() if PARTS.fullmatch(file.name))
        return {f"{file.parent.name}/{file.name}": file.read_bytes() for file in found}

    def fetch(self, file: Path, into: Path) -> None:
        with write_errors(into, 0):
            shutil.copyfile(file, into)

    def remove(self, files: Iterable[Path], folder: Path) -> None:
        for file in files:
            file.unlink(missing_ok=True)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


class SshHost:
    """Over the user's ssh with keys; never asks for a password."""

    def __init__(self, name: str) -> None:
        self.name = name

    def lists(self, local: Path) -> dict[str, bytes]:
        where = shlex.quote(str(local))
        listed = self._run(f"test ! -d {where} || (cd {where} && find . -mindepth 2 -maxdepth 2 -type f -name '__*.parts.json')")
        files = [Path(line) for line in listed.decode("utf-8", "replace").splitlines()]
        kept = [file for file in files if PARTS.fullmatch(file.name) and _FOLDER.fullmatch(file.parent.name)]
        return {str(file): self._run(f"cat {shlex.quote(str(local / file.parent.name / file.name))}") for file in kept}

    def fetch(self, file: Path, into: Path) -> None:
        with write_errors(into, 0), into.open("wb") as stream:
            self._checked(
                subprocess.run(
                    [*self._ssh(), f"cat {shlex.quote(str(file))}"], stdout=stream, stderr=subprocess.PIPE, check=False
                )
            )

    def remove(self, files: Iterable[Path], folder: Path) -> None:
        names = " ".join(shlex.quote(str(file)) for file in files)
        self._run(f"rm -f -- {names} && (rmdir -- {shlex.quote(str(folder))} 2>/dev/null || true)")

    def _run(self, command: str) -> bytes:
        return self._checked(subprocess.run([*self._ssh(), command], capture_output=True, check=False)).stdout

    def _ssh(self) -> list[str]:
        return ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "--", self.name]

    def _checked(self, done: subprocess.CompletedProcess[bytes]) -> subprocess.CompletedProcess[bytes]:
        if done.returncode:
            lines = (done.stderr or b"").decode("utf-8", "replace").strip().splitlines()
            raise BadInput(f"ssh to {self.name} failed: {lines[-1] if lines else f'exit code {done.returncode}'}")
        return done
