"""Requests in flight: their number, their mean duration, and how to cancel them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Literal

from windlass.tasks.serve.backend.admission import DEFAULT_SECONDS

CancelReason = Literal["", "disconnected", "deadline", "shutdown", "operator"]
"""Not cancelled; the client disconnected; the deadline passed; the server shuts down; the operator cancelled it (`windlass top`)."""
NEW_SHARE = 0.1
"""Weight of the newest value in the running mean, once there are ten."""


class InFlightRequest:
    """Belongs to the task that creates it."""

    __slots__ = (
        "_task",
        "cancel_reason",
        "first_token",
        "num_sequences",
        "num_tokens",
        "number",
        "prompt_tokens",
        "share",
        "started",
        "unsettled_tokens",
    )

    def __init__(self, num_sequences: int, number: int = 0, share: str = "") -> None:
        self.num_sequences, self.number, self.share = num_sequences, number, share
        self.prompt_tokens = self.num_tokens = 0
        """So far, over its sequences."""
        self.unsettled_tokens = 0
        """Computed for it since its energy was last settled; the prompt's come with the first one."""
        self.first_token: float | None = None
        """When it came (perf_counter)."""
        self.started = time.perf_counter()
        self.cancel_reason: CancelReason = ""
        self._task = asyncio.current_task()

    def cancel(self, reason: CancelReason) -> None:
        """Cancels the task and records why. The first reason counts."""
        if not self.cancel_reason and self._task is not None:
            self.cancel_reason = reason
            self._task.cancel()

    def was_cancelled(self) -> bool:
        """For the task, on CancelledError: True if the cancellation came from `cancel`, and the client is to get an error response."""
        return bool(self.cancel_reason and self._task is not None and self._task.uncancel() == 0)


class InFlightRequests:
    def __init__(self, beside: InFlightRequests | None = None) -> None:
        """`beside`: of another model of the same server; a number is one request's over all of them."""
        self._open: dict[int, InFlightRequest] = {}
        self._numbers: Iterator[int] = itertools.count(1) if beside is None else beside._numbers
        self.num_sequences = 0
        self.by_share: Counter[str] = Counter()
        """Sequences in flight of each key or address; only of those that have any."""
        self.mean_seconds = DEFAULT_SECONDS
        self._num_ended = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def track(self, num_sequences: int, share: str = "", is_timed: bool = True) -> Generator[InFlightRequest]:
        flight = InFlightRequest(num_sequences, next(self._numbers), share)
        self._open[flight.number] = flight
        self.num_sequences += num_sequences
        self.by_share[share] += num_sequences
        self._idle.clear()
        try:
            yield flight
        finally:
            del self._open[flight.number]
            self.num_sequences -= num_sequences
            self.by_share[share] -= num_sequences
            if not self.by_share[share]:
                del self.by_share[share]
            if is_timed and not flight.cancel_reason:
                self._num_ended += 1
                weight = max(NEW_SHARE, 1 / self._num_ended)
                self.mean_seconds += weight * (time.perf_counter() - flight.started - self.mean_seconds)
            if not self._open:
                self._idle.set()

    @property
    def requests(self) -> list[InFlightRequest]:
        """Oldest first."""
        return list(self._open.values())

    def cancel(self, number: int, reason: CancelReason) -> bool:
        """Whether there was such a request."""
        flight = self._open.get(number)
        if flight is not None:
            flight.cancel(reason)
        return flight is not None

    def cancel_all(self, reason: CancelReason) -> None:
        for flight in list(self._open.values()):
            flight.cancel(reason)

    async def wait_idle(self, seconds: float) -> bool:
        """Whether all requests finished before the timeout."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
