"""Merges the delta streams of several requests. All deltas that are ready form one batch, so that they can be one write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from windlass.core.client import Client
from windlass.core.request import Delta, Request
from windlass.foreign import is_failure

Batch = list[tuple[int, Delta]]
"""Request index and its delta."""


async def merge_streams(client: Client, requests: Sequence[Request]) -> AsyncGenerator[Batch, None]:
    """Until all have finished. An error in one ends all; so does closing the generator."""
    if len(requests) > 1:
        async with aclosing(_merged(client, requests)) as merged:
            async for batch in merged:
                yield batch
        return
    async with aclosing(client.generate(requests[0])) as deltas:
        async for delta in deltas:
            yield [(0, delta)]


async def _merged(client: Client, requests: Sequence[Request]) -> AsyncGenerator[Batch, None]:
    queue = _DeltaQueue()
    turns = _prefill_turns(requests)
    tasks = [
        asyncio.create_task(_pump(client, index, request, queue, turn))
        for index, (request, turn) in enumerate(zip(requests, turns, strict=True))
    ]
    num_open = len(tasks)
    try:
        while num_open:
            batch, num_ended = await queue.take()
            num_open -= num_ended
            if batch:
                yield batch
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(client: Client, index: int, request: Request, queue: _DeltaQueue, turn: _PrefillTurn) -> None:
    try:
        await turn.wait()
        async with aclosing(client.generate(request)) as deltas:
            async for delta in deltas:
                if delta.token_ids:
                    turn.started.set()
                queue.put(index, delta)
    except BaseException as error:
        if not is_failure(error):
            raise
        queue.fail(error)
    else:
        queue.end()
    finally:
        turn.started.set()


class _PrefillTurn:
    """The first of several sequences with the same prompt prefills it; the others start after that and hit the prefix cache."""

    def __init__(self, first: _PrefillTurn | None) -> None:
        self.started = asyncio.Event()
        self._first = first

    async def wait(self) -> None:
        if self._first is not None:
            await self._first.started.wait()


def _prefill_turns(requests: Sequence[Request]) -> list[_PrefillTurn]:
    """Copies of a request share the prompt object."""
    firsts: dict[int, _PrefillTurn] = {}
    turns: list[_PrefillTurn] = []
    for request in requests:
        prompt = id(next(one for one in (request.messages, request.prompt, request.token_ids) if one is not None))
        turns.append(_PrefillTurn(firsts.get(prompt)))
        firsts.setdefault(prompt, turns[-1])
    return turns


class _DeltaQueue:
    def __init__(self) -> None:
        self._batch: Batch = []
        self._num_ended = 0
        self._error: BaseException | None = None
        self._woken = asyncio.Event()

    def put(self, index: int, delta: Delta) -> None:
        self._batch.append((index, delta))
        self._woken.set()

    def end(self) -> None:
        self._num_ended += 1
        self._woken.set()

    def fail(self, error: BaseException) -> None:
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
