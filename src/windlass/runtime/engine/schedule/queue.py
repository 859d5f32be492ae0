"""The waiting queue, fair between owners: preempted sequences first, then the oldest sequence of whoever was served least. Pure.

Fair on two levels: between groups (API keys, addresses), and within a group between users. An owner is `GROUP/USER`, so that naming many
users gives a group nothing. Service is counted in tokens: computed prompt tokens and output tokens. The counter of an owner that arrives
or returns is raised to the least one of the active owners, so that staying away saves up no claim (the virtual token counter of Sheng et
al., Fairness in Serving Large Language Models, arXiv 2401.00588). With one owner the queue is first come, first served.

Priorities are weights: a token of priority p counts 2^p times, and at equal counters the lower priority value comes first. So an urgent
request that arrives is next, urgent ones together get a larger share, and the share of none becomes zero. A preempted sequence is passed by
more urgent ones only, and only while these have been served no more than it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Generic, TypeVar

from windlass.runtime.engine.schedule.sequence import Sequence

MAX_COUNTERS = 10_000
"""Counters kept of owners that are gone; dropping one gives its owner a fresh start."""
SEPARATOR = "/"
Flow = tuple[str, int]
"""Sequences that are served in order of arrival: of one user with one priority."""


Name = TypeVar("Name")


class ServiceCounters(Generic[Name]):
    """Tokens served to each of several parties."""

    def __init__(self) -> None:
        self._active: dict[Name, int] = {}
        """Number of its sequences, waiting or running."""
        self._served: dict[Name, float] = {}

    def __bool__(self) -> bool:
        return bool(self._active)

    def served(self, name: Name) -> float:
        return self._served[name]

    def enter(self, name: Name) -> None:
        if name not in self._active:
            self._raise_counter(name)
        self._active[name] = self._active.get(name, 0) + 1

    def leave(self, name: Name) -> None:
        self._active[name] -= 1
        if not self._active[name]:
            del self._active[name]
        if not self._active:
            self._served.clear()  # nobody is left to compare with

    def charge(self, name: Name, amount: float) -> None:
        self._served[name] += amount

    def _raise_counter(self, name: Name) -> None:
        if len(self._served) > MAX_COUNTERS:
            self._served = {other: self._served[other] for other in self._active}
        least = min((self._served[other] for other in self._active), default=0.0)
        self._served[name] = max(self._served.get(name, 0.0), least)


class OwnerGroup:
    """The waiting sequences of a group, by user and priority."""

    def __init__(self) -> None:
        self.counters = ServiceCounters[Flow]()
        self.queues: dict[Flow, deque[Sequence]] = {}
        """No empty ones."""

    @property
    def next(self) -> Sequence:
        if len(self.queues) == 1:
            return next(iter(self.queues.values()))[0]
        flow = min(self.queues, key=lambda flow: (self.counters.served(flow), flow[1], self.queues[flow][0].arrival))
        return self.queues[flow][0]

    def remove(self, sequence: Sequence) -> None:
        flow = flow_of(sequence)
        self.queues[flow].remove(sequence)
        if not self.queues[flow]:
            del self.queues[flow]


def group_of(sequence: Sequence) -> str:
    return sequence.owner.partition(SEPARATOR)[0]


def flow_of(sequence: Sequence) -> Flow:
    return sequence.owner.partition(SEPARATOR)[2], sequence.priority


class WaitingQueue:
    def __init__(self) -> None:
        self._requeued: deque[Sequence] = deque()
        self._groups: dict[str, OwnerGroup] = {}
        """Of all groups that have sequences, waiting or running."""
        self._counters = ServiceCounters[str]()
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Sequence]:
        """Preempted ones, then in order of arrival."""
        return chain(self._requeued, sorted(chain(*self._queues()), key=lambda sequence: sequence.arrival))

    def _queues(self) -> Iterable[deque[Sequence]]:
        return (queue for group in self._groups.values() for queue in group.queues.values())

    @property
    def next(self) -> Sequence:
        if not self._requeued:
            return self._next_new()
        first = self._requeued[0]
        if self._num_waiting == len(self._requeued):
            return first
        new = self._next_new()
        return new if new.priority < first.priority and self._served_no_more(new, first) else first

    def _next_new(self) -> Sequence:
        """Of those that were not preempted."""
        firsts = [(name, group.next) for name, group in self._groups.items() if group.queues]
        if len(firsts) == 1:
            return firsts[0][1]
        return min(firsts, key=lambda first: (self._counters.served(first[0]), first[1].priority, first[1].arrival))[1]

    def _served_no_more(self, one: Sequence, other: Sequence) -> bool:
        name, other_name = group_of(one), group_of(other)
        if name != other_name:
            return self._counters.served(name) <= self._counters.served(other_name)
        flows = self._groups[name].counters
        return flows.served(flow_of(one)) <= flows.served(flow_of(other))

    def add(self, sequence: Sequence) -> None:
        name, flow = group_of(sequence), flow_of(sequence)
        self._counters.enter(name)
        group = self._groups.setdefault(name, OwnerGroup())
        group.counters.enter(flow)
        group.queues.setdefault(flow, deque()).append(sequence)
        self._num_waiting += 1

    def requeue(self, sequence: Sequence) -> None:
        """A preempted sequence: ahead of all that are not more urgent."""
        self._requeued.appendleft(sequence)
        self._num_waiting += 1

    def remove(self, sequence: Sequence) -> None:
        """From the queue, to run or, with `finish`, for good."""
        self._num_waiting -= 1
        if sequence in self._requeued:
            self._requeued.remove(sequence)
        else:
            self._groups[group_of(sequence)].remove(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Finished or cancelled."""
        name = group_of(sequence)
        group = self._groups[name]
        group.counters.leave(flow_of(sequence))
        if not group.counters:
            del self._groups[name]
        self._counters.leave(name)

    def charge(self, sequence: Sequence, num_tokens: int) -> None:
        cost = num_tokens * 2.0**sequence.priority
        name = group_of(sequence)
        self._counters.charge(name, cost)
        self._groups[name].counters.charge(flow_of(sequence), cost)
