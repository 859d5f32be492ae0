"""Stands between us and a program that is not ours, so that it and all it started end with us: `python -m windlass.launch.guard WORD...`.

The program gets a process group of its own, so that Ctrl-C in a terminal does not reach it. When standard input closes (whoever
holds the other end ended, in whatever way) the group is asked to end, and after a while made to. Its children that outlive it are
ended too. The exit status is the program's. Knows no program.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from windlass.machine.parent_death import adopt_orphans, kill_with_parent

SECONDS_TO_END = 5.0
"""vLLM that serves ends in less than one; while it loads it does not listen to signals."""


def main(argv: list[str]) -> int:
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # only the end of standard input counts
    adopt_orphans()
    try:
        program = subprocess.Popen(argv, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_in_child)
    except OSError as error:
        print(f"{argv[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    asked = _wait(program)
    _end(program, asked)
    return program.returncode if program.returncode >= 0 else 128 - program.returncode


def _in_child() -> None:
    """Ignored signals stay ignored across exec; and should this guard be killed outright, Linux tells the program."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_DFL)
    kill_with_parent(signal.SIGTERM)


def _woken(number: int, frame: object) -> None:
    """A signal with a handler writes to the pipe; one without does not."""


def _wait(program: subprocess.Popen[bytes]) -> bool:
    """Until standard input closes (True) or the program ends (False)."""
    waker, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, _woken)
    while program.poll() is None:
        ready, _, _ = select.select([sys.stdin, waker], [], [], 1.0)
        if waker in ready:
            os.read(waker, 512)
        if sys.stdin in ready and not os.read(sys.stdin.fileno(), 512):
            return True
    return False


def _end(program: subprocess.Popen[bytes], asked: bool) -> None:
    """The group, first gently. What is left of a program that ended by itself has nothing to put in order."""
    if asked:
        _signal_group(program.pid, signal.SIGTERM)
        _until(lambda: program.poll() is not None and not _group_lives(program.pid), SECONDS_TO_END)
    _signal_group(program.pid, signal.SIGKILL)
    program.wait()
    _until(lambda: not _group_lives(program.pid), SECONDS_TO_END)


def _until(done: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        _reap()
        time.sleep(0.02)


def _reap() -> None:
    """Grandchildren that became ours. It may take the program's own status, which nobody asks for once it was told to end."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _signal_group(group: int, name: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
