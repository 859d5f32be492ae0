"""How long a rank waits in collectives, by part of the step: whom the others wait for is the rank that waits least.

`Work.wait` of torch.distributed is timed. With gloo it blocks until the collective has ended. With NCCL it returns at once and the GPU waits, so
nothing is counted on GPUs. What autograd runs in C++ (the backward pass of an all-to-all) is not seen either.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Work

from windlass.tasks.train.progress import RankTimes

PARTS: tuple[str, ...] = ("model", "gradients", "sums")
"""Forward and backward passes; sums of gradients after them; sums of a few numbers (losses, norms, loads), where a step begins and ends."""
EVERY_STEPS = 10
_plain_wait = Work.wait


class RankClock:
    """Of the thread that made it; checkpoints are written by another, and wait on their own."""

    def __init__(self) -> None:
        self.step_seconds, self.steps = 0.0, 0
        self.waited = dict.fromkeys(PARTS, 0.0)
        """Seconds in collectives, by part."""
        self._part = "sums"
        self._thread = threading.get_ident()
        self._hosts: list[str] = []
        _time_waits(self)

    def add(self, seconds: float) -> None:
        if threading.get_ident() == self._thread:
            self.waited[self._part] += seconds

    @contextmanager
    def part(self, name: str) -> Generator[None]:
        before, self._part = self._part, name
        try:
            yield
        finally:
            self._part = before

    def end_step(self, seconds: float) -> tuple[RankTimes, ...]:
        """Counts a step. After every tenth, the totals of all ranks; all ranks call it together."""
        self.step_seconds += seconds
        self.steps += 1
        return self._gathered() if self.steps % EVERY_STEPS == 0 else ()

    def _gathered(self) -> tuple[RankTimes, ...]:
        rank, world = dist.get_rank(), dist.get_world_size()
        if not self._hosts:
            self._hosts = [""] * world
            dist.all_gather_object(self._hosts, socket.gethostname())
        table = torch.zeros(world, 2 + len(PARTS), dtype=torch.float64)
        table[rank] = torch.tensor([self.steps, self.step_seconds, *self.waited.values()], dtype=torch.float64)
        dist.all_reduce(table)
        return _rows(table.tolist(), self._hosts)


def _rows(table: Sequence[Sequence[float]], hosts: Sequence[str]) -> tuple[RankTimes, ...]:
    return tuple(
        RankTimes(rank, hosts[rank], int(steps), seconds, dict(zip(PARTS, waited, strict=True)))
        for rank, (steps, seconds, *waited) in enumerate(table)
    )


def _time_waits(clock: RankClock) -> None:
    def wait(work: Any, *arguments: Any, **options: Any) -> Any:
        began = perf_counter()
        try:
            return _plain_wait(work, *arguments, **options)
        finally:
            clock.add(perf_counter() - began)

    Work.wait = wait  # pyright: ignore[reportAttributeAccessIssue]
