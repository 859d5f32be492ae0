"""Signals end the server whatever its event loop does: a thread that waits for the loop to act on them, and ends the process if it does not.

The event loop may be stuck in a loop of Python, or in a library that has released the lock of the interpreter.
"""

from __future__ import annotations

import faulthandler
import os
import queue
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

SECONDS_TO_NOTICE = 10.0
"""For the event loop to see the first signal."""
SECONDS_TO_END = 10.0
"""For a server that ends without finishing its requests."""
SECONDS_TO_SHOW = 1.0
"""For where it is stuck to be written: a pipe that nobody reads takes for ever."""
OVER = 0
"""No signal's number."""


class Watchdog:
    def __init__(self, end: Callable[[int], None] = os._exit) -> None:
        self._end = end
        self._numbers: queue.SimpleQueue[int] = queue.SimpleQueue()  # its put() may be called by a signal's handler
        self.is_noticed = False
        """The event loop has seen the first signal."""

    @contextmanager
    def watching(self) -> Generator[None]:
        thread = threading.Thread(target=self.watch, name="signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._numbers.put(OVER)
            thread.join()

    def signal(self, number: int) -> None:
        self._numbers.put(number)

    def watch(self) -> None:
        first = self._numbers.get()
        if first == OVER:
            return
        following = self._next(SECONDS_TO_NOTICE)
        if following is None and self.is_noticed:  # requests are being finished
            following = self._next(None)
        if following is not None and self.is_noticed:
            following = following and self._next(SECONDS_TO_END)
        if following != OVER:
            with suppress(Exception):  # no room for another thread
                showing = threading.Thread(target=_show_stacks, name="stacks", daemon=True)
                showing.start()
                showing.join(SECONDS_TO_SHOW)
            self._end(128 + first)

    def _next(self, seconds: float | None) -> int | None:
        """The number of the next signal; None: none came."""
        with suppress(queue.Empty):
            return self._numbers.get(timeout=seconds)
        return None


def _show_stacks() -> None:
    """Where it is stuck. By way of memory: faulthandler keeps the interpreter's lock while it writes, which may be for ever."""
    with suppress(Exception), os.fdopen(os.memfd_create("stacks"), "r+b") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        os.write(sys.stderr.fileno(), file.read())
