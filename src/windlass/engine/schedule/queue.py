"""The waiting queue, fair between owners: preempted sequences first, then the oldest sequence of the owner that was served least. Pure.

Service is counted in tokens: computed prompt tokens and output tokens. The counter of an owner that arrives or returns is raised to the
least one of the active owners, so that staying away saves up no claim (the virtual token counter of Sheng et al., Fairness in Serving
Large Language Models, arXiv 2401.00588). With one owner the queue is first come, first served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain

from windlass.engine.schedule.sequence import Sequence

MAX_COUNTERS = 10_000
"""Counters kept of owners that are gone; dropping one gives its owner a fresh start."""


class WaitingQueue:
    def __init__(self) -> None:
        self._requeued: deque[Sequence] = deque()
        self._queues: dict[str, deque[Sequence]] = {}
        """By owner; no empty queues."""
        self._active: dict[str, int] = {}
        """Owner -> number of its sequences, waiting or running."""
        self._tokens_served: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._requeued) + sum(map(len, self._queues.values()))

    def __bool__(self) -> bool:
        return bool(self._requeued or self._queues)

    def __iter__(self) -> Iterator[Sequence]:
        """Preempted ones, then in order of arrival."""
        return chain(self._requeued, sorted(chain(*self._queues.values()), key=lambda sequence: sequence.arrival))

    @property
    def next(self) -> Sequence:
        return self._requeued[0] if self._requeued else self._queues[self._next_owner()][0]

    def add(self, sequence: Sequence) -> None:
        owner = sequence.owner
        if owner not in self._active:
            self._set_counter(owner)
        self._active[owner] = self._active.get(owner, 0) + 1
        self._queues.setdefault(owner, deque()).append(sequence)

    def pop(self, first: Sequence) -> None:
        """Removes what `next` returned; charging its owner may have changed who is next."""
        queue = self._requeued or self._queues[first.owner]
        assert queue[0] is first
        queue.popleft()
        self._drop_empty(first.owner)

    def requeue(self, sequence: Sequence) -> None:
        """A preempted sequence: ahead of all others."""
        self._requeued.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """From the queue; `finish` must follow."""
        if sequence in self._requeued:
            self._requeued.remove(sequence)
        else:
            self._queues[sequence.owner].remove(sequence)
            self._drop_empty(sequence.owner)

    def finish(self, sequence: Sequence) -> None:
        """Finished or cancelled."""
        owner = sequence.owner
        self._active[owner] -= 1
        if not self._active[owner]:
            del self._active[owner]
        if not self._active:
            self._tokens_served.clear()  # no owner is left to compare with

    def charge(self, owner: str, num_tokens: int) -> None:
        self._tokens_served[owner] += num_tokens

    def _set_counter(self, owner: str) -> None:
        if len(self._tokens_served) > MAX_COUNTERS:
            self._tokens_served = {other: self._tokens_served[other] for other in self._active}
        least = min((self._tokens_served[other] for other in self._active), default=0)
        self._tokens_served[owner] = max(self._tokens_served.get(owner, 0), least)

    def _next_owner(self) -> str:
        if len(self._queues) == 1:
            return next(iter(self._queues))
        return min(self._queues, key=lambda owner: (self._tokens_served[owner], self._queues[owner][0].arrival))

    def _drop_empty(self, owner: str) -> None:
        if owner in self._queues and not self._queues[owner]:
            del self._queues[owner]
