"""Requests that were let in and have not ended: how many, how long they take, and how to end one from outside."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal

from windlass.serve.backend.admission import SOME_SECONDS

Why = Literal["", "gone", "late", "closing"]
"""Nothing; the client went away; its deadline passed; the server ends."""
NEW_SHARE = 0.1
"""Of the newest in the running mean, once there are ten."""


class Flight:
    """Of the task that is current when it is made."""

    __slots__ = ("_task", "num_sequences", "started", "why")

    def __init__(self, num_sequences: int) -> None:
        self.num_sequences = num_sequences
        self.started = time.perf_counter()
        self.why: Why = ""
        self._task = asyncio.current_task()

    def end(self, why: Why) -> None:
        """Its task is cancelled, and finds here why. The first reason counts."""
        if not self.why and self._task is not None:
            self.why = why
            self._task.cancel()

    def was_ended(self) -> bool:
        """To be asked by the task on a CancelledError: ours, and so to be answered, or somebody else's?"""
        return bool(self.why and self._task is not None and self._task.uncancel() == 0)


class Flights:
    def __init__(self) -> None:
        self._open: set[Flight] = set()
        self.in_flight = 0
        """Sequences."""
        self.seconds_each = SOME_SECONDS
        self._num_ended = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def opened(self, num_sequences: int, is_timed: bool = True) -> Generator[Flight]:
        flight = Flight(num_sequences)
        self._open.add(flight)
        self.in_flight += num_sequences
        self._idle.clear()
        try:
            yield flight
        finally:
            self._open.discard(flight)
            self.in_flight -= num_sequences
            if is_timed and not flight.why:
                self._num_ended += 1
                share = max(NEW_SHARE, 1 / self._num_ended)
                self.seconds_each += share * (time.perf_counter() - flight.started - self.seconds_each)
            if not self._open:
                self._idle.set()

    def end_all(self, why: Why) -> None:
        for flight in list(self._open):
            flight.end(why)

    async def all_ended(self, seconds: float) -> bool:
        """Whether they were before the time was up."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
