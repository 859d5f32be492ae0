"""Processes that tests start: starting one that cannot be waited for for ever, who has started whom, and whether they are over.

Read from /proc: `ps` is not everywhere, and cuts its lines at the width of the terminal.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from waiting import HUNG_SECONDS, until

PROC = Path("/proc")


LASTING = {"PYTEST_LASTING": "1"}
"""In the environment of processes that serve tests of several files; all others end with the file that started them (time_limits.py)."""


class Process(NamedTuple):
    pid: int
    parent: int
    state: str
    words: tuple[str, ...]
    """Its command line; empty where it is over or belongs to the kernel."""

    @property
    def is_over(self) -> bool:
        """A zombie is over, whoever ought to wait for it."""
        return self.state in "ZX"


def look(pid: int) -> Process | None:
    """None where there is none."""
    try:
        state, parent, *_ = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except (OSError, ValueError):
        return None
    return Process(pid, int(parent), state, tuple(words))


def everyone() -> list[Process]:
    pids = [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]
    return [found for found in map(look, pids) if found is not None]


def environment(pid: int) -> dict[str, str]:
    """That it was started with; empty where it cannot be read."""
    try:
        found = (PROC / str(pid) / "environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.partition("=")[::2] for entry in found.split("\0") if entry)


def is_running(pid: int) -> bool:
    found = look(pid)
    return found is not None and not found.is_over


def children(pid: int, word: str = "") -> list[int]:
    """Processes that it has started and that are not over; of those, the ones with `word` on their command line."""
    found = [process for process in everyone() if process.parent == pid and not process.is_over]
    return [process.pid for process in found if not word or any(word in given for given in process.words)]


def until_gone(*pids: int) -> None:
    until(lambda: not any(map(is_running, pids)), lambda: f"of {pids}, these live on: {[pid for pid in pids if is_running(pid)]}")


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def python_program(path: Path, code: str) -> Path:
    """A file that can be started. A first line that named this Python would end at 127 characters, or at a space."""
    path.write_text(f"#!/bin/sh\n'''exec' {shlex.quote(sys.executable)} \"$0\" \"$@\"\n' '''\n{code}")
    path.chmod(0o700)
    return path


@contextlib.contextmanager
def lasting() -> Generator[None]:
    """Of a fixture of the whole session: what is started inside serves tests of several files."""
    os.environ.update(LASTING)
    try:
        yield
    finally:
        for name in LASTING:
            del os.environ[name]


@contextlib.contextmanager
def started(command: Sequence[Any], **options: Any) -> Generator[subprocess.Popen[Any]]:
    """As `with subprocess.Popen(...)`, which waits for the process however the block was left; this one kills it."""
    process = subprocess.Popen(command, **options)
    try:
        yield process
    finally:
        process.kill()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        process.wait(HUNG_SECONDS)
