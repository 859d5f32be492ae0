"""Who has cost others something, for a while: groups of users (API keys, addresses) whose requests ended a worker or an engine."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable

from windlass.core.client import Slowed

MAX_GROUPS = 10_000


def group_of(owner: str) -> str:
    """An owner is GROUP/USER; the user may be whatever the client says."""
    return owner.partition("/")[0]


class Offenders:
    def __init__(self, most: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`most` within `seconds`; with more, a group is refused."""
        self._most, self._seconds, self._clock = most, seconds, clock
        self._ended: OrderedDict[str, deque[float]] = OrderedDict()
        """Group -> when."""

    def recent(self, group: str) -> int:
        times = self._ended.get(group)
        while times and times[0] <= self._clock() - self._seconds:
            times.popleft()
        return len(times or ())

    def check(self, group: str) -> None:
        if self.recent(group) > self._most:
            raise Slowed("too many of your requests needed more than they are given, or ended an engine; retry later")

    def note(self, group: str) -> None:
        self._ended.setdefault(group, deque()).append(self._clock())
        self._ended.move_to_end(group)
        while len(self._ended) > MAX_GROUPS:
            self._ended.popitem(last=False)
