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
        self._cleared: set[str] = set()
        """Groups that have done well since."""

    def recent(self, group: str) -> int:
        times = self._ended.get(group)
        while times and times[0] <= self._clock() - self._seconds:
            times.popleft()
        return len(times or ())

    def is_suspect(self, group: str) -> bool:
        return group not in self._cleared and self.recent(group) > 0

    def check(self, group: str) -> None:
        over = self.recent(group) - self._most
        if over > 0:
            seconds = self._ended[group][over - 1] + self._seconds - self._clock()
            raise Slowed("too many of your requests needed more than they are given, or ended an engine; retry later", seconds)

    def note(self, group: str) -> None:
        self._ended.setdefault(group, deque()).append(self._clock())
        self._ended.move_to_end(group)
        self._cleared.discard(group)
        while len(self._ended) > MAX_GROUPS:
            self._cleared.discard(self._ended.popitem(last=False)[0])

    def clear(self, group: str) -> None:
        """No longer suspect; what it did is not forgotten."""
        if group in self._ended:
            self._cleared.add(group)
