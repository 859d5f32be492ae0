"""Who waits, and who is next: sequences that lost their blocks first, then of all owners with something waiting the one that was served
least, its oldest sequence. Pure.

Served is counted in tokens: of a prompt those that are computed for it, and every token of an answer. An owner that comes, or comes
back, starts level with the least served one there, so that nobody saves up a claim by staying away, and nobody is made to pay twice
(the virtual token counter of Sheng et al., Fairness in Serving Large Language Models, arXiv 2401.00588). With one owner it is first
come, first served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain

from windlass.engine.schedule.sequence import Sequence

MAX_REMEMBERED = 10_000
"""Owners that are gone, while others never are. Forgetting one gives it a fresh start."""


class WaitingQueue:
    def __init__(self) -> None:
        self._put_back: deque[Sequence] = deque()
        self._queues: dict[str, deque[Sequence]] = {}
        """Of owners with something waiting."""
        self._present: dict[str, int] = {}
        """Owner -> its sequences, waiting or running."""
        self._served: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._put_back) + sum(map(len, self._queues.values()))

    def __bool__(self) -> bool:
        return bool(self._put_back or self._queues)

    def __iter__(self) -> Iterator[Sequence]:
        """Those that were put back, then in order of arrival."""
        return chain(self._put_back, sorted(chain(*self._queues.values()), key=lambda sequence: sequence.arrival))

    @property
    def first(self) -> Sequence:
        """Who is next."""
        return self._put_back[0] if self._put_back else self._queues[self._next_owner()][0]

    def enter(self, sequence: Sequence) -> None:
        owner = sequence.owner
        if owner not in self._present:
            self._level(owner)
        self._present[owner] = self._present.get(owner, 0) + 1
        self._queues.setdefault(owner, deque()).append(sequence)

    def take(self, first: Sequence) -> None:
        """What `first` told runs now. Serving it may have changed who is next."""
        queue = self._put_back or self._queues[first.owner]
        assert queue[0] is first
        queue.popleft()
        self._drop_empty(first.owner)

    def put_back(self, sequence: Sequence) -> None:
        """It ran; before all others."""
        self._put_back.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It waits no more; `leave` must follow."""
        if sequence in self._put_back:
            self._put_back.remove(sequence)
        else:
            self._queues[sequence.owner].remove(sequence)
            self._drop_empty(sequence.owner)

    def leave(self, sequence: Sequence) -> None:
        """It is finished or cancelled."""
        owner = sequence.owner
        self._present[owner] -= 1
        if not self._present[owner]:
            del self._present[owner]
        if not self._present:
            self._served.clear()  # nobody is left to be compared with

    def serve(self, owner: str, num_tokens: int) -> None:
        self._served[owner] += num_tokens

    def _level(self, owner: str) -> None:
        if len(self._served) > MAX_REMEMBERED:
            self._served = {other: self._served[other] for other in self._present}
        least = min((self._served[other] for other in self._present), default=0)
        self._served[owner] = max(self._served.get(owner, 0), least)

    def _next_owner(self) -> str:
        if len(self._queues) == 1:
            return next(iter(self._queues))
        return min(self._queues, key=lambda owner: (self._served[owner], self._queues[owner][0].arrival))

    def _drop_empty(self, owner: str) -> None:
        if owner in self._queues and not self._queues[owner]:
            del self._queues[owner]
