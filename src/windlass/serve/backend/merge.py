"""Several answers at once as one stream of batches: all that is ready makes one batch, so that it can be one write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from windlass.core.client import Client
from windlass.core.request import Delta, Request

Batch = list[tuple[int, Delta]]
"""Which of the requests, and what came for it."""


async def batches(client: Client, requests: Sequence[Request]) -> AsyncGenerator[Batch, None]:
    """Until all have ended. An error of one ends all; so does closing this."""
    if len(requests) > 1:
        async with aclosing(_merged(client, requests)) as merged:
            async for batch in merged:
                yield batch
        return
    async with aclosing(client.generate(requests[0])) as deltas:
        async for delta in deltas:
            yield [(0, delta)]


async def _merged(client: Client, requests: Sequence[Request]) -> AsyncGenerator[Batch, None]:
    arrived = _Arrived()
    turns = _turns(requests)
    tasks = [
        asyncio.create_task(_pump(client, index, request, arrived, turn))
        for index, (request, turn) in enumerate(zip(requests, turns, strict=True))
    ]
    num_open = len(tasks)
    try:
        while num_open:
            batch, num_ended = await arrived.take()
            num_open -= num_ended
            if batch:
                yield batch
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(client: Client, index: int, request: Request, arrived: _Arrived, turn: _Turn) -> None:
    try:
        await turn.comes()
        async with aclosing(client.generate(request)) as deltas:
            async for delta in deltas:
                turn.begun.set()
                arrived.put(index, delta)
    except Exception as error:  # noqa: BLE001 - raised again by whoever waits
        arrived.fail(error)
    else:
        arrived.end()
    finally:
        turn.begun.set()


class _Turn:
    """The first of several answers to one prompt reads it; the others begin when it has, and find it in the cache."""

    def __init__(self, first: _Turn | None) -> None:
        self.begun = asyncio.Event()
        self._first = first

    async def comes(self) -> None:
        if self._first is not None:
            await self._first.begun.wait()


def _turns(requests: Sequence[Request]) -> list[_Turn]:
    """Copies of a request share its prompt, the very object."""
    firsts: dict[int, _Turn] = {}
    turns: list[_Turn] = []
    for request in requests:
        prompt = id(next(one for one in (request.messages, request.prompt, request.token_ids) if one is not None))
        turns.append(_Turn(firsts.get(prompt)))
        firsts.setdefault(prompt, turns[-1])
    return turns


class _Arrived:
    def __init__(self) -> None:
        self._batch: Batch = []
        self._num_ended = 0
        self._error: Exception | None = None
        self._woken = asyncio.Event()

    def put(self, index: int, delta: Delta) -> None:
        self._batch.append((index, delta))
        self._woken.set()

    def end(self) -> None:
        self._num_ended += 1
        self._woken.set()

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._woken.set()

    async def take(self) -> tuple[Batch, int]:
        await self._woken.wait()
        self._woken.clear()
        if self._error is not None:
            raise self._error
        found, self._batch = self._batch, []
        ended, self._num_ended = self._num_ended, 0
        return found, ended
