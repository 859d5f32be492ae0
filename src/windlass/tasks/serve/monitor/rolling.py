"""Rates and percentiles over the last minute, for the page. Prometheus keeps the history."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

SECONDS = 60.0
RATE_SECONDS = 5.0
MAX_VALUES = 4096
"""Kept at most; under high load the window is shorter than a minute."""


class RollingValues:
    """Values of the last minute."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._values: deque[tuple[float, float]] = deque(maxlen=MAX_VALUES)

    def add(self, value: float) -> None:
        self._values.append((self._now(), value))

    def percentile(self, share: float) -> float | None:
        """Nearest-rank percentile for `share` in 0..1; None without values."""
        oldest = self._now() - SECONDS
        values = sorted(value for at, value in self._values if at >= oldest)
        if not values:
            return None
        return values[min(int(share * len(values)), len(values) - 1)]


class RollingRate:
    """Events per second over the last few seconds, counted in half-second buckets."""

    BUCKET_SECONDS = 0.5

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = now()
        self._buckets: deque[list[int]] = deque()
        self._last, self._ends = [0, 0], 0.0
        """The bucket that is being filled, [its number, its count], and when it ends."""

    def add(self, count: int) -> None:
        now = self._now()
        if now >= self._ends:
            self._begin(int(now / self.BUCKET_SECONDS))
        self._last[1] += count

    def _begin(self, bucket: int) -> None:
        self._last, self._ends = [bucket, 0], (bucket + 1) * self.BUCKET_SECONDS
        self._buckets.append(self._last)
        while self._buckets[0][0] < bucket - RATE_SECONDS / self.BUCKET_SECONDS - 1:
            self._buckets.popleft()

    @property
    def per_second(self) -> float:
        now = self._now()
        oldest = (now - RATE_SECONDS) / self.BUCKET_SECONDS
        total = sum(count for bucket, count in self._buckets if bucket >= oldest)
        return total / max(min(RATE_SECONDS, now - self._began), self.BUCKET_SECONDS)
