"""Those at a worker's door who have proved nothing yet: few at a time, each for seconds, and no more of them a second than cost nothing.

When there is no room, the oldest goes of the address that has the most: a root needs milliseconds, and strangers of one address do not keep
others out. While a job runs nobody new is needed, so knocking is answered slowly: a flood then fills the kernel's queue, and not a core.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

MAX_HALF_OPEN = 48
PER_SECOND, AT_ONCE = 200.0, 400.0
"""Connections that are looked at while a job runs. At about 0.2 ms each that is a twenty-fifth of one core."""


class ConnectionLimiter:
    def __init__(self) -> None:
        self._inside: dict[int, tuple[str, Callable[[], object]]] = {}
        self._numbers = 0
        self._allowed, self._last = AT_ONCE, time.monotonic()

    def __len__(self) -> int:
        return len(self._inside)

    def enter(self, address: str, send_away: Callable[[], object]) -> int:
        """A number to `leave` with. Whoever was here too long is sent away for it."""
        if len(self._inside) >= MAX_HALF_OPEN:
            self._make_room()
        self._numbers += 1
        self._inside[self._numbers] = address, send_away
        return self._numbers

    def leave(self, number: int) -> None:
        self._inside.pop(number, None)

    def _make_room(self) -> None:
        """The oldest come first in the dictionary."""
        crowd = Counter(address for address, _ in self._inside.values()).most_common(1)[0][0]
        oldest = next(number for number, (address, _) in self._inside.items() if address == crowd)
        self._inside.pop(oldest)[1]()

    def pause_seconds(self, now: float) -> float:
        """To wait before the next is let in, while a job runs."""
        self._allowed = min(self._allowed + (now - self._last) * PER_SECOND, AT_ONCE) - 1.0
        self._last = now
        return max(-self._allowed / PER_SECOND, 0.0)


class RefusalLog:
    """Strangers, told of once a second at most and by number: a log is not theirs to fill."""

    def __init__(self) -> None:
        self._count, self._last = 0, ""

    def add(self, address: str, why: str) -> None:
        self._count += 1
        self._last = f"{address}: {why}"

    def summary(self) -> str:
        """Of those since it was last asked; empty: none."""
        count, self._count = self._count, 0
        if not count:
            return ""
        return f"refused {self._last}" if count == 1 else f"refused {count:,} connections, the last from {self._last}"
