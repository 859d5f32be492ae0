"""Load progress, reported at most a few times a second."""

from __future__ import annotations

import time
from collections.abc import Callable


class ThrottledProgress:
    def __init__(self, report: Callable[[int, int], None], interval_seconds: float) -> None:
        """`report`: (bytes loaded, total)."""
        self._report, self._interval = report, interval_seconds
        self._last = float("-inf")  # not 0: a machine may have been started a moment ago

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        if done_bytes >= total_bytes or now - self._last > self._interval:
            self._last = now
            self._report(done_bytes, total_bytes)
