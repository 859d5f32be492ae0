"""A client against a small server of the tests' own: how it finds out how to ask, loads, and whatever goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pytest
from fake_server import FakeServer

from waiting import HUNG_SECONDS
from windlass.core.client import Unavailable
from windlass.errors import BadInput, Error
from windlass.tasks.bench.served.client.dialect import CHAT, COMPLETIONS, Dialect, body, candidates
from windlass.tasks.bench.served.client.target import Target
from windlass.tasks.bench.served.load import Load
from windlass.tasks.bench.served.record import LoadRun
from windlass.tasks.bench.served.summary import Limits, summarize

pytest.importorskip("httpx")
pytestmark = pytest.mark.pure

Result = TypeVar("Result")


def against(server: FakeServer, work: Callable[[Target], Awaitable[Result]], **options: Any) -> Result:
    async def run() -> Result:
        async with asyncio.timeout(HUNG_SECONDS), server.listening():
            target = Target(server.url, **options)
            try:
                return await work(target)
            finally:
                await target.close()

    return asyncio.run(run())


async def opened(target: Target) -> Dialect:
    return (await target.open()).dialect


def loaded(server: FakeServer, load: Load, **options: Any) -> LoadRun:
    async def run(target: Target) -> LoadRun:
        await target.open()
        await target.check([load])
        return await target.run(load, "seed")

    return against(server, run, **options)


def closed(at_once: int, requests: int, prompt_tokens: int = 20, new_tokens: int = 5) -> Load:
    return Load(at_once=at_once, requests=requests, prompt_tokens=prompt_tokens, new_tokens=new_tokens)


# --- how to ask


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        ({}, Dialect()),
        ({"unknown": ["ignore_eos"]}, Dialect(length="min_tokens")),
        ({"unknown": ["ignore_eos", "min_tokens"]}, Dialect(length="")),
        ({"unknown": ["stream_options"]}, Dialect(usage=False)),
        ({"takes_ids": False}, Dialect(prompt="text")),
        ({"missing": ["/v1/completions", "/tokenize"]}, Dialect(path=CHAT, prompt="text")),
        (
            {"missing": ["/v1/completions"], "unknown": ["max_tokens", "ignore_eos", "min_tokens"]},
            Dialect(path=CHAT, prompt="text", length="", max_field="max_completion_tokens"),
        ),
    ],
)
def test_the_dialect_is_found(behaviour: dict[str, Any], expected: Dialect) -> None:
    assert against(FakeServer(**behaviour), opened) == expected


def test_candidates_differ_and_the_best_is_first() -> None:
    found = list(candidates())
    assert len({body(one, "m", "x" if one.prompt == "text" else [1], 3) for one in found}) == len(found)
    assert found[0] == Dialect() and {one.path for one in found} == {COMPLETIONS, CHAT}


@pytest.mark.parametrize(
    ("behaviour", "options", "kind", "expected"),
    [
        ({"missing": ["/v1/completions", "/v1/chat/completions"]}, {}, BadInput, "refuses"),
        ({"slots": 0}, {}, Unavailable, "429 full"),
        ({"missing": ["/v1/models"]}, {}, Error, "Not Found"),
        ({}, {"model": "other"}, BadInput, "it lists fake"),
        ({"key": "k"}, {}, Error, "key"),
    ],
)
def test_servers_that_cannot_be_asked(
    behaviour: dict[str, Any], options: dict[str, Any], kind: type[Error], expected: str
) -> None:
    with pytest.raises(kind, match=expected):
        against(FakeServer(**behaviour), opened, **options)


def test_nobody_there() -> None:
    server = FakeServer()

    async def run() -> None:
        async with server.listening():
            pass
        await Target(server.url).open()

    with pytest.raises(Unavailable, match="unreachable"):
        asyncio.run(run())


def test_a_key_is_sent() -> None:
    assert len(loaded(FakeServer(key="k"), closed(2, 4), api_key="k").records) == 4


def test_what_does_not_fit_is_said_before() -> None:
    with pytest.raises(BadInput, match="512 tokens"):
        loaded(FakeServer(), closed(1, 1, prompt_tokens=510))


# --- loads


def test_a_closed_loop() -> None:
    server = FakeServer()
    run = loaded(server, closed(4, 24))
    asked = server.bodies[-24:]
    assert all(record.is_answered and record.num_tokens == 5 and record.prompt_tokens == 20 for record in run.records)
    assert all(len(record.times) == 5 and run.began <= record.sent < record.times[0] <= record.ended for record in run.records)
    assert server.most_running == 4 and all(len(one["prompt"]) == 20 and one["max_tokens"] == 5 for one in asked)
    assert all(one["temperature"] == 0 and one["stream"] and one["ignore_eos"] for one in asked)
    assert len({tuple(one["prompt"][:3]) for one in asked}) == 24, "no prompts begin alike"
    assert {token for one in asked for token in one["prompt"]} <= set(range(1000, 1900)), "ordinary tokens of its vocabulary"
    assert server.connections <= 4 + 1, "connections are kept; one is for what is not streamed"
    assert run.client_cpu_seconds > 0 and run.steps is None


def test_the_same_load_again_has_other_prompts() -> None:
    """Or the server would have them in its prefix cache."""
    server, load = FakeServer(), closed(1, 3)

    async def twice(target: Target) -> None:
        await target.open()
        await target.run(load, "seed")
        await target.run(load, "seed")

    against(server, twice)
    first, second = ([tuple(one["prompt"]) for one in server.bodies[begin : begin + 3]] for begin in (-6, -3))
    assert not {prompt[:4] for prompt in first} & {prompt[:4] for prompt in second}


def test_poisson() -> None:
    load = Load(rate=500.0, requests=30, prompt_tokens=8, new_tokens=3)
    assert [record.num_tokens for record in loaded(FakeServer(), load).records] == [3] * 30


def test_words_have_the_tokens_that_were_asked_for() -> None:
    """A chat whose template adds 13."""
    run = loaded(FakeServer(missing=["/v1/completions"], template=13), closed(2, 6, prompt_tokens=50))
    assert {record.prompt_tokens for record in run.records} == {50}


def test_without_usage_events_are_tokens() -> None:
    run = loaded(FakeServer(unknown=["stream_options"]), closed(1, 2))
    assert [(record.completion_tokens, record.num_tokens, record.prompt_tokens) for record in run.records] == [(0, 5, 0)] * 2


def test_answers_that_end_early_are_seen() -> None:
    run = loaded(FakeServer(unknown=["ignore_eos", "min_tokens"]), closed(1, 2))
    assert summarize([run], Limits()).short_answers == 2


# --- what goes wrong


def test_refused_and_broken_requests_are_counted() -> None:
    server = FakeServer(slots=3, break_at={4})  # number 0 finds out how to ask
    found = summarize([loaded(server, closed(4, 40))], Limits())
    assert found.requests == 40 and found.answered == server.generated - 1
    assert found.errors["connection lost"] == 1 and found.errors["429 full"] >= 1
    assert sum(found.errors.values()) + found.answered == 40 and server.most_running == 3


def test_a_kept_connection_that_the_server_closed_is_no_error() -> None:
    server = FakeServer(drops_kept=True)
    run = loaded(server, closed(2, 10))
    assert all(record.is_answered for record in run.records) and server.connections >= 10


def test_a_server_that_goes_away() -> None:
    server, load = FakeServer(), closed(8, 100)

    async def run() -> LoadRun:
        async with asyncio.timeout(HUNG_SECONDS):
            async with server.listening():
                target = Target(server.url)
                await target.open()
            target._connections.close()
            found = await target.run(load, "seed")
            await target.close()
            return found

    found = asyncio.run(run())
    assert len(found.records) == 8 and all(record.error.startswith("cannot connect") for record in found.records)
