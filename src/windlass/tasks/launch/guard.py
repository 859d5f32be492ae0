"""Runs another program so that it and all its children end with us: `python -m windlass.tasks.launch.guard [--grace SECONDS] PROGRAM ARGUMENT...`.

The program gets its own process group, so Ctrl-C in a terminal does not reach it. When standard input closes, because the process at the
other end ended, the group gets SIGTERM, and SIGKILL after a timeout. Children that outlive the program are ended too. The exit status is
the program's.
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

from windlass.runtime.machine.parent_death import adopt_orphans, kill_with_parent

SECONDS_TO_END = 5.0
"""A serving vLLM ends in less than one second; while it loads it ignores signals."""


def main(argv: list[str]) -> int:
    grace = SECONDS_TO_END
    if argv[0] == "--grace":  # a training run saves first
        grace, argv = float(argv[1]), argv[2:]
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_IGN)  # only the end of standard input ends the guard
    adopt_orphans()
    try:
        program = subprocess.Popen(argv, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_in_child)
    except OSError as error:
        print(f"cannot start {argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
        return 127
    input_closed = _wait(program)
    _end(program, input_closed, grace)
    return program.returncode if program.returncode >= 0 else 128 - program.returncode


def _in_child() -> None:
    """Ignored signals would stay ignored across exec. If this guard is killed, Linux sends the program SIGTERM."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_DFL)
    kill_with_parent(signal.SIGTERM)


def _ignore(number: int, frame: object) -> None:
    """Without a handler a signal does not write to the wakeup pipe."""


def _wait(program: subprocess.Popen[bytes]) -> bool:
    """Until standard input closes (True) or the program ends (False)."""
    waker, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, _ignore)
    while program.poll() is None:
        ready, _, _ = select.select([sys.stdin, waker], [], [], 1.0)
        if waker in ready:
            os.read(waker, 512)
        if sys.stdin in ready and not os.read(sys.stdin.fileno(), 512):
            return True
    return False


def _end(program: subprocess.Popen[bytes], input_closed: bool, grace: float) -> None:
    """SIGTERM first, unless the program ended by itself; then SIGKILL for what is left of its group."""
    if input_closed:
        _signal_group(program.pid, signal.SIGTERM)
        _until(lambda: program.poll() is not None and not _group_lives(program.pid), grace)
    _signal_group(program.pid, signal.SIGKILL)
    program.wait()
    _until(lambda: not _group_lives(program.pid), SECONDS_TO_END)


def _until(done: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        _reap()
        time.sleep(0.02)


def _reap() -> None:
    """Waits for adopted grandchildren. It may take the program's own status, which is not needed after SIGTERM."""
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
