"""Several answers as one stream of batches."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from fake import FakeClient

import owned_time
from windlass.core.client import Unavailable
from windlass.core.request import Request
from windlass.errors import BadInput
from windlass.tasks.serve.backend.merge import merge_streams
from windlass.wire.server.requests import expand_n

pytestmark = pytest.mark.pure


def texts(client: FakeClient, requests: list[Request]) -> list[str]:
    async def run() -> list[str]:
        found = [""] * len(requests)
        async with aclosing(merge_streams(client, requests)) as arriving:
            async for batch in arriving:
                assert batch
                for index, delta in batch:
                    found[index] += delta.content
        return found

    return owned_time.run(run())


@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("seconds", [0.0, 0.001])
def test_all_of_every_answer_comes(count: int, seconds: float) -> None:
    requests = [Request(prompt=f"prompt {number}", max_tokens=number + 1) for number in range(count)]
    expected = ["".join(f"w{word} " for word in range(number + 1)) for number in range(count)]
    assert texts(FakeClient(seconds=seconds), requests) == expected


def test_one_that_fails_ends_all() -> None:
    client = FakeClient(seconds=0.01, tokens=1000)
    with pytest.raises(BadInput):
        texts(client, [Request(prompt="fine"), Request(prompt="x" * 5000)])
    assert client.running == client.waiting == 0


def test_a_crash_is_raised_once_and_leaves_nothing() -> None:
    client = FakeClient(seconds=0.01, tokens=1000)

    async def run() -> None:
        async with aclosing(merge_streams(client, [Request(prompt=str(number)) for number in range(4)])) as arriving:
            with pytest.raises(Unavailable):
                async for _ in arriving:
                    client.crash()

    owned_time.run(run())
    assert client.running == client.waiting == 0 and client.cancelled == 4


def test_copies_wait_until_the_first_has_read_the_prompt() -> None:
    """So that they find it in the cache; other prompts do not wait."""
    client = FakeClient(first_seconds=0.05, seconds=0.01, tokens=3)

    async def run() -> list[int]:
        waiting: list[int] = []
        requests = [*expand_n(Request(prompt="long"), 3), *expand_n(Request(prompt="other"), 2)]
        reading = asyncio.create_task(drained(client, requests))
        await asyncio.sleep(0.02)
        waiting.append(len(client.requests))
        await reading
        return [*waiting, len(client.requests)]

    assert owned_time.run(run()) == [2, 5]


async def drained(client: FakeClient, requests: list[Request]) -> None:
    async with aclosing(merge_streams(client, requests)) as arriving:
        async for _ in arriving:
            pass
