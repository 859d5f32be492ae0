"""Windlass commands that run on this machine, found in /proc. Knows no options of commands."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from windlass.core.model import Frozen
from windlass.runtime.machine.proc import field_bytes, read_text

PROC = Path("/proc")


class RunningCommand(Frozen):
    pid: int
    arguments: tuple[str, ...]
    """After `windlass`: `serve`, `MODEL`, ..."""
    memory_bytes: int
    """Resident, of the process and all that it started."""
    started: float
    """Unix time."""


def running_commands(proc: Path = PROC) -> list[RunningCommand]:
    """This user's, oldest first; not this process, and not the engine processes that a command starts."""
    found = {pid: arguments for pid in _own_pids(proc) if (arguments := windlass_arguments(_command_line(proc, pid)))}
    parents = {pid: _parent(proc, pid) for pid in _own_pids(proc)}
    own = {os.getpid(), os.getppid()}
    tops = [pid for pid in found if pid not in own and not _is_below(pid, set(found), parents)]
    made = [_described(proc, pid, found[pid], parents) for pid in tops]
    return sorted(made, key=lambda command: (command.started, command.pid))


def _described(proc: Path, pid: int, arguments: tuple[str, ...], parents: dict[int, int]) -> RunningCommand:
    memory, started = _memory(proc, pid, parents), _started(proc, pid)
    return RunningCommand(pid=pid, arguments=arguments, memory_bytes=memory, started=started)


def windlass_arguments(line: list[str]) -> tuple[str, ...]:
    """Of `windlass serve X`, `python .../bin/windlass serve X` and `python -m windlass serve X`; else empty."""
    for index, word in enumerate(line[:4]):
        if Path(word).name == "windlass" and (index == 0 or "python" in Path(line[0]).name):
            return tuple(line[index + 1 :])
    return ()


def _own_pids(proc: Path) -> Iterator[int]:
    for folder in proc.iterdir():
        try:
            if folder.name.isdecimal() and folder.stat().st_uid == os.getuid():
                yield int(folder.name)
        except OSError:  # it has just ended
            continue


def _command_line(proc: Path, pid: int) -> list[str]:
    return [word for word in read_text(f"{proc}/{pid}/cmdline").split("\0") if word]


def _parent(proc: Path, pid: int) -> int:
    # The name, in parentheses, may contain anything: fields are counted from its end (proc_pid_stat(5)).
    fields = read_text(f"{proc}/{pid}/stat").rpartition(")")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0


def _is_below(pid: int, commands: set[int], parents: dict[int, int]) -> bool:
    above = parents.get(pid, 0)
    seen: set[int] = set()
    while above and above not in seen:
        if above in commands:
            return True
        seen.add(above)
        above = parents.get(above, 0)
    return False


def _memory(proc: Path, pid: int, parents: dict[int, int]) -> int:
    below = [other for other in parents if other != pid and _is_below(other, {pid}, parents)]
    return sum(field_bytes(read_text(f"{proc}/{one}/status"), "VmRSS") or 0 for one in (pid, *below))


def _started(proc: Path, pid: int) -> float:
    try:
        return (proc / str(pid)).stat().st_ctime
    except OSError:
        return 0.0
