"""No orphans: a process that ends with whoever started it, in the middle of a step too. There is nothing here to put in order first."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading

PR_SET_PDEATHSIG = 1
"""linux/prctl.h"""


def end_with(descriptor: int) -> None:
    """This process ends when the other end of the socket is closed, whatever happened to whoever held it."""
    threading.Thread(target=_wait, args=(descriptor,), daemon=True).start()


def _wait(descriptor: int) -> None:
    """No other event is asked for."""
    poll = select.poll()
    poll.register(descriptor, 0)
    poll.poll()
    os._exit(0)


def die_with_parent() -> None:
    """Should the socket have been inherited by somebody who outlives the parent, Linux still tells of its end."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        return
    parent = os.getppid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it could be watched
        os._exit(0)
