"""Groups whose ranks are threads of one process: every rank of a layout at once, where it can be looked at. Sums have the order of ranks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from windlass.core.layout import Layout
from windlass.runtime.parallel.group import Count
from windlass.runtime.parallel.groups import Groups, make_groups

TIMEOUT_SECONDS = 60.0
Result = TypeVar("Result")


class _Meeting:
    """Where the ranks of one group put down what they say."""

    def __init__(self, size: int) -> None:
        self.said: dict[int, Tensor] = {}
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_SECONDS)
        self.passed_on = [queue.SimpleQueue[Tensor | None]() for _ in range(size)]
        """What each rank is sent by the one before it; None: nothing more will come."""

    def end(self) -> None:
        self.barrier.abort()
        for waiting in self.passed_on:
            waiting.put(None)


class ThreadGroup:
    """Counts nothing: what is said here goes nowhere."""

    is_native = False

    def __init__(self, meeting: _Meeting, rank: int, size: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, size

    def all_reduce(self, x: Tensor) -> None:
        x.copy_(torch.stack(self._heard(x)).sum(0))

    def all_gather(self, x: Tensor, into: Sequence[Tensor]) -> None:
        for to, part in zip(into, self._heard(x), strict=True):
            to.copy_(part)

    def gather(self, x: Tensor, into: Sequence[Tensor]) -> None:
        heard = self._heard(x)
        if self.rank == 0:
            for to, part in zip(into, heard, strict=True):
                to.copy_(part)

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self._heard(x)[0])

    def send_next(self, x: Tensor) -> None:
        self._meeting.passed_on[(self.rank + 1) % self.size].put(x.clone())

    def receive_previous(self, x: Tensor) -> None:
        passed_on = self._meeting.passed_on[self.rank].get(timeout=TIMEOUT_SECONDS)
        if passed_on is None:
            raise threading.BrokenBarrierError
        x.copy_(passed_on)

    def counts(self) -> dict[str, Count]:
        return {}

    def close(self) -> None:
        """Whoever waits for this rank waits no longer."""
        self._meeting.end()

    def _heard(self, x: Tensor) -> list[Tensor]:
        """What all ranks say. Two barriers: all have spoken, all have heard."""
        meeting = self._meeting
        meeting.said[self.rank] = x.clone()
        meeting.barrier.wait()
        heard = [meeting.said[rank] for rank in range(self.size)]
        meeting.barrier.wait()
        return heard


def run_ranks(layout: Layout, work: Callable[[int, Groups], Result]) -> list[Result]:
    """work(rank, its groups) of every rank, at the same time; the results in the order of ranks. What one raises, this raises."""
    meetings: dict[str, _Meeting] = {}
    holding = threading.Lock()
    raised: list[BaseException] = []

    def join(name: str, rank: int, size: int) -> ThreadGroup:
        with holding:
            return ThreadGroup(meetings.setdefault(name, _Meeting(size)), rank, size)

    def one(rank: int) -> Result:
        try:
            return work(rank, make_groups(layout, rank, join))
        except BaseException as error:
            raised.append(error)
            for meeting in meetings.values():
                meeting.end()
            raise

    with ThreadPoolExecutor(layout.world) as pool:
        futures = [pool.submit(one, rank) for rank in range(layout.world)]
    if raised:  # the first: others then waited in vain
        raise raised[0]
    return [future.result() for future in futures]
