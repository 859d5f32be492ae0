"""Waiting for what must come, however long it takes. Nobody is to judge by it how quick something is."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import TypeVar

HUNG_SECONDS = 240.0
"""What has not come after so long never will: it hangs. Less than a test's own limit (time_limits.py), so that its words are the ones read."""
LOOK_SECONDS = 0.02
Found = TypeVar("Found")


def until(found: Callable[[], Found], what: Callable[[], object] | str = "it did not come to pass") -> Found:
    """The first that is true. `what`: said where it never is."""
    end = time.monotonic() + HUNG_SECONDS
    while not (result := found()):
        assert time.monotonic() < end, f"hung: {what() if callable(what) else what}"
        time.sleep(LOOK_SECONDS)
    return result


def hear_interrupts() -> None:
    """Programs that are started here are to hear of Ctrl-C, also where tests run in the background of a script, which ignores it for them."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
