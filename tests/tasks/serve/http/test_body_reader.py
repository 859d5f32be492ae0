"""BodyReader: too large one by one, too many bytes together, too slow."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fake import FakeClient
from hypothesis import given
from hypothesis import strategies as st
from raw_http import raw_request
from serving import HELLO, post, running

from waiting import HUNG_SECONDS
from windlass.tasks.serve.http.asgi import ClientDisconnected
from windlass.tasks.serve.http.body_reader import UNCOUNTED_BYTES, BodyReader
from windlass.wire.schema.errors import ApiError

pytestmark = pytest.mark.pure

CHAT = "/v1/chat/completions"


def sent(*parts: bytes, more: bool = False) -> Callable[[], Awaitable[Any]]:
    """What ASGI gives; with `more` the rest never comes."""
    left = list(parts)

    async def receive() -> Any:
        if not left:
            await asyncio.Event().wait()
        part = left.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(left) or more}

    return receive


async def read(bodies: BodyReader, receive: Callable[[], Awaitable[Any]]) -> bytes:
    return await bodies.read({"headers": []}, receive)  # type: ignore[arg-type]


@given(st.lists(st.binary(max_size=50), min_size=1))
def test_what_is_within_bounds_is_read_as_it_is(parts: list[bytes]) -> None:
    bodies = BodyReader(10_000, 10_000, 5.0)
    assert asyncio.run(read(bodies, sent(*parts))) == b"".join(parts)
    assert bodies.buffered_bytes == 0


def test_together_they_have_a_limit_and_small_ones_always_pass() -> None:
    large = b"x" * (UNCOUNTED_BYTES + 1000)

    async def ask() -> None:
        bodies = BodyReader(10**7, 2500, 30.0)
        waiting = [asyncio.create_task(read(bodies, sent(large, more=True))) for _ in range(2)]
        await asyncio.sleep(0.01)
        assert bodies.buffered_bytes == 2000
        with pytest.raises(ApiError) as found:
            await read(bodies, sent(large))
        assert (found.value.status, found.value.retry_seconds) == (503, 1)
        assert bodies.buffered_bytes == 2000
        assert await read(bodies, sent(b"x" * UNCOUNTED_BYTES)) == b"x" * UNCOUNTED_BYTES
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert bodies.buffered_bytes == 0
        assert await read(bodies, sent(large)) == large

    asyncio.run(ask())


@pytest.mark.parametrize("ending", ["disconnected", "slow", "large"])
def test_however_it_ends_nothing_is_held(ending: str) -> None:
    async def gone() -> Any:
        return {"type": "http.disconnect"}

    async def ask() -> None:
        bodies = BodyReader(UNCOUNTED_BYTES + 10, 10**6, 0.05)
        receive = {"disconnected": gone, "slow": sent(b"x", more=True), "large": sent(b"x" * (UNCOUNTED_BYTES + 9), b"xx")}[
            ending
        ]
        with pytest.raises(ClientDisconnected if ending == "disconnected" else ApiError) as found:
            await read(bodies, receive)
        if isinstance(found.value, ApiError):
            assert found.value.status == (408 if ending == "slow" else 413)
        assert bodies.buffered_bytes == 0

    asyncio.run(ask())


def test_bodies_that_are_begun_and_not_ended_do_not_fill_the_memory() -> None:
    size = 2**20
    with running(FakeClient, max_body_bytes=size, max_bodies_bytes=4 * size, head_seconds=HUNG_SECONDS) as server:
        head = f"POST {CHAT} HTTP/1.1\nHost: localhost\nContent-Length: {size}"
        connections = []
        for _ in range(12):
            with contextlib.suppress(ConnectionError):
                connections.append(raw_request(server, head, b" " * (size - 1)))
        server.until(lambda: server.service.metrics.outcomes["unavailable"] >= 7)
        assert server.call(lambda: server.service.body_reader.buffered_bytes) <= 4 * size
        answer = post(server.url + CHAT, json=HELLO)
        assert answer.status_code == 200
        for connection in connections:
            connection.close()
        server.until(lambda: server.service.body_reader.buffered_bytes == 0)
        outcomes = server.service.metrics.outcomes
        assert outcomes["unavailable"] + outcomes["cancelled"] == 12 and outcomes["length"] + outcomes["stop"] == 1
