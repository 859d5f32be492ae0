"""Child processes that end with their parent, however it ended, in the middle of their work too."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""linux/prctl.h"""


def exit_on_close(descriptor: int, status: int = 0) -> None:
    """This process exits when the other end of the socket or pipe is closed."""
    threading.Thread(target=_wait, args=(descriptor, status), daemon=True).start()


def _wait(descriptor: int, status: int) -> None:
    poll = select.poll()
    poll.register(descriptor, 0)  # hang-up and errors are always reported
    poll.poll()
    os._exit(status)


def kill_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Linux sends this process a signal when its parent ends: also if a process that outlives the parent inherited the socket."""
    parent = os.getppid()
    if _prctl(PR_SET_PDEATHSIG, number) and os.getppid() != parent:  # it ended before it could be watched
        os._exit(0)


def adopt_orphans() -> None:
    """Grandchildren whose parent ended become children of this process, which can wait for them."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> bool:
    """False where there is none: not on Linux."""
    found = getattr(ctypes.CDLL(None), "prctl", None)
    if found is not None:
        found(option, value)
    return found is not None
