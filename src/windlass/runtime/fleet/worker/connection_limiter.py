"""Limits unauthenticated connections to a worker: how many are open, and, while a job runs, how many are accepted per second.

When too many are open, the oldest of the address with the most is dropped: a root needs only milliseconds, and one address cannot lock
others out. While a job runs connections are accepted slowly: a flood then fills the kernel's backlog instead of using a core.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

MAX_HALF_OPEN = 48
RATE_PER_SECOND, BURST = 200.0, 400.0
"""Token bucket while a job runs. At about 0.2 ms per connection that is 4 % of one core."""


class ConnectionLimiter:
    def __init__(self) -> None:
        self._open: dict[int, tuple[str, Callable[[], object]]] = {}
        self._last_id = 0
        self._tokens, self._last = BURST, time.monotonic()

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, address: str, drop: Callable[[], object]) -> int:
        """Returns an ID for `leave`. May drop another connection to make room."""
        if len(self._open) >= MAX_HALF_OPEN:
            self._drop_oldest()
        self._last_id += 1
        self._open[self._last_id] = address, drop
        return self._last_id

    def leave(self, number: int) -> None:
        self._open.pop(number, None)

    def _drop_oldest(self) -> None:
        """The dictionary is in order of age."""
        crowd = Counter(address for address, _ in self._open.values()).most_common(1)[0][0]
        oldest = next(number for number, (address, _) in self._open.items() if address == crowd)
        self._open.pop(oldest)[1]()

    def pause_seconds(self, now: float) -> float:
        """To wait before the next accept, while a job runs."""
        self._tokens = min(self._tokens + (now - self._last) * RATE_PER_SECOND, BURST) - 1.0
        self._last = now
        return max(-self._tokens / RATE_PER_SECOND, 0.0)


class RefusalLog:
    """Counts refused connections, so that the log gets one line a second at most."""

    def __init__(self) -> None:
        self._count, self._last = 0, ""

    def add(self, address: str, why: str) -> None:
        self._count += 1
        self._last = f"{address}: {why}"

    def summary(self) -> str:
        """Of refusals since the last call; empty: none."""
        count, self._count = self._count, 0
        if not count:
            return ""
        return f"refused {self._last}" if count == 1 else f"refused {count:,} connections, the last from {self._last}"
