"""Numbers of the last minute, for people who look now: rates and percentiles. Prometheus keeps the rest."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

SECONDS = 60.0
RATE_SECONDS = 5.0
MOST = 4096
"""Values kept; a busier minute is a shorter window."""


class Recent:
    """Values of the last minute."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._values: deque[tuple[float, float]] = deque(maxlen=MOST)

    def add(self, value: float) -> None:
        self._values.append((self._now(), value))

    def percentile(self, share: float) -> float | None:
        """The smallest value that at least `share` of them do not exceed; None without any."""
        oldest = self._now() - SECONDS
        values = sorted(value for at, value in self._values if at >= oldest)
        if not values:
            return None
        return values[min(int(share * len(values)), len(values) - 1)]


class Rate:
    """Things per second, over the last few seconds. Counted by the half second, so that counting costs nothing."""

    GRAIN = 0.5

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = now()
        self._buckets: deque[tuple[int, int]] = deque()

    def add(self, count: int) -> None:
        grain = int(self._now() / self.GRAIN)
        if self._buckets and self._buckets[-1][0] == grain:
            self._buckets[-1] = (grain, self._buckets[-1][1] + count)
        else:
            self._buckets.append((grain, count))
            while self._buckets[0][0] < grain - RATE_SECONDS / self.GRAIN - 1:
                self._buckets.popleft()

    @property
    def per_second(self) -> float:
        now = self._now()
        oldest = (now - RATE_SECONDS) / self.GRAIN
        total = sum(count for grain, count in self._buckets if grain >= oldest)
        return total / max(min(RATE_SECONDS, now - self._began), self.GRAIN)
