"""Sends the requests of a load: users in a closed loop, or Poisson arrivals. Knows neither HTTP nor prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from windlass.tasks.bench.served.arrivals import schedule
from windlass.tasks.bench.served.load import Load
from windlass.tasks.bench.served.record import RequestRecord

Send = Callable[[int, float], Awaitable[RequestRecord]]
"""(number of the request, when it is due) -> what came of it."""
Clock = Callable[[], float]
Done = Callable[[int], None]
"""Gets the number of requests that ended."""
REFUSED_SECONDS = 0.5
"""A user waits so long after an error, or a server that refuses at once would be asked thousands of times a second."""
HOPELESS = 8
"""So many failures, and at least one per user, without a single answer: the load is given up."""


class Runner:
    """One run of one load."""

    def __init__(self, load: Load, send: Send, clock: Clock, seed: str = "", done: Done = lambda _: None) -> None:
        self._load, self._send, self._clock, self._seed, self._done = load, send, clock, seed, done
        self._records: list[RequestRecord] = []
        self._sent = self._answered = 0
        self._began = 0.0

    async def run(self) -> tuple[RequestRecord, ...]:
        """In the order in which they ended."""
        self._began = self._clock()
        async with asyncio.TaskGroup() as group:
            if self._load.rate:
                await self._arrivals(group)
            else:
                for _ in range(self._load.at_once):
                    group.create_task(self._user())
        return tuple(self._records)

    async def _user(self) -> None:
        while self._may_send():
            record = await self._request(self._clock())
            if record.error and self._may_send():
                await asyncio.sleep(REFUSED_SECONDS)

    async def _arrivals(self, group: asyncio.TaskGroup) -> None:
        load = self._load
        for arrival in schedule(load.rate, self._seed, load.requests, load.seconds):
            due = self._began + arrival
            await asyncio.sleep(max(due - self._clock(), 0.0))
            if self._is_hopeless():
                return
            group.create_task(self._request(due))

    async def _request(self, due: float) -> RequestRecord:
        number, self._sent = self._sent, self._sent + 1
        record = await self._send(number, due)
        self._records.append(record)
        self._answered += record.is_answered
        self._done(len(self._records))
        return record

    def _may_send(self) -> bool:
        load = self._load
        is_over = self._sent >= load.requests if load.requests is not None else self._elapsed() >= (load.seconds or 0.0)
        return not is_over and not self._is_hopeless()

    def _elapsed(self) -> float:
        return self._clock() - self._began

    def _is_hopeless(self) -> bool:
        return not self._answered and len(self._records) >= max(HOPELESS, self._load.at_once)
