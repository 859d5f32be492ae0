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
    tasks = [asyncio.create_task(_pump(client, index, request, arrived)) for index, request in enumerate(requests)]
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


async def _pump(client: Client, index: int, request: Request, arrived: _Arrived) -> None:
    try:
        async with aclosing(client.generate(request)) as deltas:
            async for delta in deltas:
                arrived.put(index, delta)
    except Exception as error:  # noqa: BLE001 - raised again by whoever waits
        arrived.fail(error)
    else:
        arrived.end()


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
