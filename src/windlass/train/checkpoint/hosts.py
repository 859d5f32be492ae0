"""Hosts with parts of checkpoints on their disks: this one, or others by ssh. No torch.

Only three things are asked of a host: what lists of parts it has, a file, and to remove what has arrived elsewhere.
"""

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
from windlass.formats.disk.atomic import write_errors
from windlass.train.checkpoint.gathering import PARTS

_FOLDER = re.compile(r"step-\d{8,}\.tmp")
_HOST = re.compile(r"[A-Za-z0-9_.@:\[\]-]+")
_HERE = frozenset({"localhost", "127.0.0.1", "::1"})


class Host(Protocol):
    name: str

    def lists(self, local: Path) -> dict[str, bytes]:
        """`step-00000010.tmp/__3.parts.json` -> its content, of every rank that saved to `local` there."""
        ...

    def fetch(self, file: Path, into: Path) -> None: ...

    def remove(self, files: Iterable[Path], folder: Path) -> None:
        """The files, and the folder once it is empty."""
        ...


def read_hostfile(path: Path) -> list[Host]:
    """One host a line, `host slots=8`, as mpirun and DeepSpeed write them; a host that stands there twice counts once."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"cannot read the hostfile {path}: {getattr(error, 'strerror', None) or error}") from None
    names: dict[str, None] = {}
    for number, line in enumerate(lines, start=1):
        words = line.split("#")[0].split()
        if not words:
            continue
        if not _HOST.fullmatch(words[0]) or words[0].startswith("-") or any("=" not in word for word in words[1:]):
            raise BadInput(f"{path}, line {number}: write a host as `host slots=8`, not {line.strip()[:60]!r}")
        names[words[0]] = None
    if not names:
        raise BadInput(f"{path} names no host; write one a line, as `host slots=8`")
    return [_host(name) for name in names]


def _host(name: str) -> Host:
    return ThisHost(name) if name in _HERE or name == socket.gethostname() else SshHost(name)


class ThisHost:
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
    """By the user's own ssh, with keys: nobody is asked for a password."""

    def __init__(self, name: str) -> None:
        self.name = name

    def lists(self, local: Path) -> dict[str, bytes]:
        where = shlex.quote(str(local))
        said = self._run(f"test ! -d {where} || (cd {where} && find . -mindepth 2 -maxdepth 2 -type f -name '__*.parts.json')")
        files = [Path(line) for line in said.decode("utf-8", "replace").splitlines()]
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
        words = " ".join(shlex.quote(str(file)) for file in files)
        self._run(f"rm -f -- {words} && (rmdir -- {shlex.quote(str(folder))} 2>/dev/null || true)")

    def _run(self, command: str) -> bytes:
        return self._checked(subprocess.run([*self._ssh(), command], capture_output=True, check=False)).stdout

    def _ssh(self) -> list[str]:
        return ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "--", self.name]

    def _checked(self, done: subprocess.CompletedProcess[bytes]) -> subprocess.CompletedProcess[bytes]:
        if done.returncode:
            said = (done.stderr or b"").decode("utf-8", "replace").strip().splitlines()
            raise BadInput(f"{self.name} cannot be asked by ssh: {said[-1] if said else f'exit code {done.returncode}'}")
        return done
