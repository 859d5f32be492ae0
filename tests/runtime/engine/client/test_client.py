"""Text in, text out, over an engine in a thread of this process."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from fake_decoder import CrashingDecoder, FakeDecoder, HeldDecoder, make_engine
from fake_text import TEMPLATE, THINKING_TEMPLATE, ids, model_text, words
from hanging import finished
from in_process import InProcessClient

from windlass.core.client import Broken, Late, SyncClient, Tokenizes, Unavailable
from windlass.core.request import GREEDY, Constraint, Delta, EmbedRequest, Info, Request, Sampling, ScoreRequest
from windlass.errors import BadInput, Error, TooLong
from windlass.runtime.engine.client.requests import EngineRequests
from windlass.runtime.engine.client.transport import Lost, Receive
from windlass.runtime.engine.protocol import Command, EngineReady, SequenceOutput, Submit
from windlass.runtime.weights.text.files import ModelText

pytestmark = pytest.mark.cpu

DECODER = FakeDecoder()
INFO = Info(model="fake", context_tokens=256, vocab_size=64, max_sequences=4)


def client_for(text: ModelText | None, decoder: FakeDecoder | None = None, **limits: Any) -> InProcessClient:
    return InProcessClient(make_engine(decoder or FakeDecoder(), **limits), INFO, text)


@asynccontextmanager
async def opened(
    text: ModelText | None = None, decoder: FakeDecoder | None = None, **limits: Any
) -> AsyncGenerator[InProcessClient, None]:
    client = client_for(model_text() if text is None else text, decoder, **limits)
    try:
        yield client
    finally:
        await client.close()


def in_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        finished(test())

    run.__name__ = test.__name__
    return run


async def gathered(client: InProcessClient, request: Request) -> Delta:
    """All deltas of an answer as one; the rules of a stream are checked on the way."""
    deltas = [delta async for delta in client.generate(request)]
    assert [delta.finish_reason is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
    last = deltas[-1]
    assert last.usage is not None
    assert last.timings is not None
    return Delta(
        content="".join(delta.content for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None),
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        usage=last.usage,
        timings=last.timings,
    )


@in_loop
async def test_a_prompt_is_continued() -> None:
    async with opened() as client:
        found = await gathered(client, Request(prompt="hello", sampling=GREEDY, max_tokens=30))
    expected = DECODER.greedy(ids("hello"), 30)
    assert found.token_ids == tuple(expected)
    assert found.content == words(expected)
    assert found.finish_reason == "length"
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (5, 30)


@in_loop
async def test_a_chat_is_put_in_its_template() -> None:
    async with opened() as client:
        messages = ({"role": "user", "content": "Hi"},)
        found = await gathered(client, Request(messages=messages, sampling=GREEDY, max_tokens=12))
    assert found.content == words(DECODER.greedy(ids("u.Hia."), 12))


@in_loop
async def test_token_ids_are_taken_as_they_are() -> None:
    async with opened() as client:
        found = await gathered(client, Request(token_ids=(7, 8, 9), sampling=GREEDY, max_tokens=5))
    assert list(found.token_ids) == DECODER.greedy([7, 8, 9], 5)


@pytest.mark.parametrize("length", [1, 2, 4])
def test_stop_strings_end_the_answer_and_never_show(length: int) -> None:
    expected = words(DECODER.greedy(ids("stop here"), 40))
    stop = expected[10 : 10 + length]
    place = expected.index(stop)

    async def run() -> None:
        async with opened() as client:
            seen = ""
            async for delta in client.generate(Request(prompt="stop here", sampling=GREEDY, max_tokens=40, stop=("zzzz", stop))):
                seen += delta.content
                assert expected[:place].startswith(seen), "a stop string leaked"
                last = delta
            assert seen == expected[:place]
            assert last.finish_reason == "stop"
            assert last.stop_token_id is None
            assert last.usage is not None
            assert place + length <= last.usage.completion_tokens <= 40
            stats = (await client.info()).stats
            assert stats is not None
            assert stats.running == 0

    asyncio.run(run())


@in_loop
async def test_a_stop_string_in_the_last_token_stops_rather_than_runs_out() -> None:
    expected = words(DECODER.greedy(ids("end"), 9))
    async with opened() as client:
        stop = expected[-2:]
        found = await gathered(client, Request(prompt="end", sampling=GREEDY, max_tokens=9, stop=(stop,)))
    assert found.content == expected[: expected.index(stop)]
    assert found.finish_reason == "stop"


@in_loop
async def test_what_only_began_to_be_a_stop_string_is_given_out_at_the_end() -> None:
    expected = words(DECODER.greedy(ids("end"), 9))
    async with opened() as client:
        found = await gathered(client, Request(prompt="end", sampling=GREEDY, max_tokens=9, stop=(expected[-2:] + "?",)))
    assert found.content == expected
    assert found.finish_reason == "length"


@in_loop
async def test_stop_tokens_are_no_text() -> None:
    expected = DECODER.greedy(ids("abc"), 40)
    stop = expected[6]
    place = expected.index(stop)
    async with opened(model_text(stop_ids=(stop,))) as client:
        found = await gathered(client, Request(prompt="abc", sampling=GREEDY, max_tokens=40))
        assert found.content == words(expected[:place])
        assert found.token_ids == tuple(expected[: place + 1])
        assert (found.finish_reason, found.stop_token_id) == ("stop", stop)
        on = await gathered(client, Request(prompt="abc", sampling=GREEDY, max_tokens=40, ignore_eos=True))
        assert on.content == words(expected)
        other = Request(prompt="abc", sampling=GREEDY, max_tokens=40, ignore_eos=True, stop_token_ids=(expected[2], 63))
        assert (await gathered(client, other)).finish_reason == "stop"
        assert stop in (await client.info()).stop_token_ids


@in_loop
async def test_many_at_once_do_not_mix() -> None:
    prompts = [f"request number {number}" for number in range(20)]
    async with opened(num_blocks=24) as client:
        requests = [Request(prompt=prompt, sampling=GREEDY, max_tokens=20) for prompt in prompts]
        found = await asyncio.gather(*(gathered(client, request) for request in requests))
    for prompt, answer in zip(prompts, found, strict=True):
        assert answer.content == words(DECODER.greedy(ids(prompt), 20))


@in_loop
async def test_leaving_early_cancels() -> None:
    decoder = HeldDecoder(steps=1)
    async with opened(decoder=decoder) as client:
        answer = client.generate(Request(prompt="long", sampling=GREEDY, max_tokens=200))
        await anext(answer)
        await answer.aclose()
        other = client.generate(Request(prompt="other", sampling=GREEDY, max_tokens=200))
        decoder.let(2)  # the step that the first was in, and one of the other
        await anext(other)
        task = asyncio.create_task(anext(other))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        decoder.let()
        stats = (await client.info()).stats
        assert stats is not None
        assert (stats.cancelled, stats.running, stats.blocks_used) == (2, 0, 0)


@in_loop
async def test_requests_that_come_and_go_leave_nothing() -> None:
    """Some wait to the end, some leave at once, some in the middle, while the cache is too small for all of them."""
    chance = random.Random(3)

    async def one(client: InProcessClient, number: int) -> None:
        prompt = f"request {number % 7} " * chance.randrange(1, 5)
        answer = client.generate(Request(prompt=prompt, sampling=GREEDY, max_tokens=chance.randrange(1, 40)))
        patience = chance.choice([0, 1, 5, 1000])
        seen: list[int] = []
        async for delta in answer:
            seen += delta.token_ids
            if len(seen) > patience:
                break
        await answer.aclose()
        assert seen == DECODER.greedy(ids(prompt), len(seen))

    async with opened(num_blocks=12) as client:
        for _ in range(4):
            await asyncio.gather(*(one(client, number) for number in range(25)))
        stats = (await client.info()).stats
        assert stats is not None
        assert (stats.waiting, stats.running, stats.blocks_used) == (0, 0, 0)
        assert stats.finished + stats.cancelled == 100
        assert stats.cancelled > 0


@in_loop
async def test_logprobs_have_texts() -> None:
    async with opened() as client:
        request = Request(prompt="hello", sampling=Sampling(seed=1), max_tokens=6, logprobs=2, prompt_logprobs=1)
        found = await gathered(client, request)
    assert "".join(entry.token for entry in found.logprobs) == found.content
    assert all(len(entry.top) == 2 and entry.top[0].token for entry in found.logprobs)
    prompt = found.prompt_logprobs or ()
    assert prompt[0] is None
    assert "".join(entry.token for entry in prompt if entry is not None) == "ello"


@in_loop
async def test_what_is_asked_beside_answers_has_an_owner_and_a_deadline_too() -> None:
    async with opened() as client:
        submits: list[Submit] = []
        owners: list[str] = []
        outputs = client._requests.outputs

        def noted(submit: Submit) -> AsyncGenerator[list[SequenceOutput], None]:
            submits.append(submit)
            return outputs(submit)

        async def render(template: str, values: Any, owner: str = "") -> str:
            owners.append(owner)
            return "hello"

        client._requests.outputs, client._isolated.render = noted, render  # type: ignore[method-assign]
        await client.score(ScoreRequest(prompt="hello", owner="1/a", deadline_seconds=50.0))
        with pytest.raises(Error):  # this engine has no hidden states
            await client.embed(EmbedRequest(prompt="hello", owner="1/b", deadline_seconds=60.0))
        assert [(submit.owner, submit.deadline_seconds) for submit in submits] == [("1/a", 50.0), ("1/b", 60.0)]
        await client.tokenize([{"role": "user", "content": "hello"}], owner="1/c")
        assert owners == ["1/c"]


@in_loop
async def test_scores_are_those_of_the_model() -> None:
    async with opened() as client:
        found = await client.score(ScoreRequest(prompt="a longer text to be scored", start=10, top=1))
        tokens = ids("a longer text to be scored")
        assert found.token_ids == tuple(tokens)
        assert [entry is None for entry in found.logprobs] == [True] * 10 + [False] * 16
        expected = DECODER.logprobs(tokens)[9:]
        assert [entry.logprob for entry in found.logprobs if entry is not None] == pytest.approx(expected, abs=1e-4)
        assert found.total == pytest.approx(sum(expected), abs=1e-3)
        assert (await client.score(ScoreRequest(token_ids=(1,)))).logprobs == (None,)


@pytest.mark.parametrize(
    ("request_", "words_", "field"),
    [
        (Request(prompt="x" * 300), "300 tokens", "prompt"),
        (Request(prompt="hello", max_tokens=1000), "lower max_tokens", "prompt"),
        (Request(token_ids=(64,)), "token 64", "prompt"),
        (Request(token_ids=()), "empty", "prompt"),
        (Request(messages=({"role": "user", "content": "Hi"},), thinking=False), "cannot switch reasoning", "thinking"),
        (Request(prompt="a", sampling=Sampling(logit_bias={64: 1.0})), "logit_bias has token 64; .* 0 to 63", "logit_bias"),
        (Request(prompt="a", stop_token_ids=(3, 64)), "stop_token_ids has token 64; .* 0 to 63", "stop_token_ids"),
        (Request(prompt="x" * 60_000), "prompt of 60,000 characters does not fit in 256 tokens", "prompt"),
        (Request(token_ids=(1,) * 60_000), "prompt of 60,000 tokens does not fit in 256 tokens", "token_ids"),
        (Request(messages=({"role": "user", "content": ""},) * 9000), "a chat of 9,000 messages does not fit", "messages"),
        (Request(messages=({"role": "user", "content": "x" * 60_000},)), "prompt of 60,004 characters", "messages"),
    ],
)
def test_bad_requests_are_refused_and_others_go_on(request_: Request, words_: str, field: str) -> None:
    async def run() -> None:
        async with opened() as client:
            with pytest.raises(BadInput, match=words_) as found:
                await gathered(client, request_)
            assert found.value.field == field
            assert isinstance(found.value, TooLong) == ("fit" in str(found.value))
            assert len((await gathered(client, Request(prompt="fine", max_tokens=3))).token_ids) == 3

    asyncio.run(run())


@in_loop
async def test_reasoning_can_be_switched_where_the_template_can() -> None:
    async with opened(model_text(THINKING_TEMPLATE)) as client:
        messages = ({"role": "user", "content": "Hi"},)
        found = await gathered(client, Request(messages=messages, thinking=False, sampling=GREEDY, max_tokens=6))
    assert found.content.strip() == words(DECODER.greedy(ids("u.Hia.N"), 6)).strip()


@in_loop
async def test_without_a_chat_template_a_chat_is_refused() -> None:
    async with opened(model_text(None)) as client:
        assert not (await client.info()).has_chat
        with pytest.raises(BadInput, match="no chat template"):
            await gathered(client, Request(messages=({"role": "user", "content": "Hi"},)))


@in_loop
async def test_without_a_tokenizer_there_are_tokens() -> None:
    client = client_for(None)
    found = await gathered(client, Request(token_ids=(1, 2), sampling=GREEDY, max_tokens=4))
    assert list(found.token_ids) == DECODER.greedy([1, 2], 4)
    assert found.content == ""
    assert not (await client.info()).has_text
    for request in (Request(prompt="text"), Request(token_ids=(1,), stop=("x",))):
        with pytest.raises(BadInput, match="tokenizer"):
            await gathered(client, request)
    await client.close()


@in_loop
async def test_an_engine_that_breaks_fails_everybody_with_its_reason() -> None:
    async with opened(decoder=CrashingDecoder()) as client:
        with pytest.raises(Unavailable, match="the device caught fire"):
            await gathered(client, Request(token_ids=(14,), max_tokens=2))


@in_loop
async def test_a_model_that_makes_no_numbers_is_an_error() -> None:
    decoder = FakeDecoder()
    decoder.broken_after = 4
    async with opened(decoder=decoder) as client:
        with pytest.raises(Broken, match="NaN or infinite"):
            await gathered(client, Request(token_ids=(1, 2, 3, 4, 5), max_tokens=2))


@in_loop
async def test_closing_ends_what_runs() -> None:
    decoder = HeldDecoder(steps=1)
    client = client_for(model_text(), decoder)
    answer = client.generate(Request(prompt="long", sampling=GREEDY, max_tokens=200))
    await anext(answer)
    closing = asyncio.create_task(client.close())
    with pytest.raises(Unavailable, match="closed"):
        await anext(answer)
    decoder.let()
    await closing
    with pytest.raises(Unavailable, match="closed"):
        await gathered(client, Request(prompt="more"))
    await client.close()


# --- programs that wait ----------------------------------------------------------------------------------------------


def test_the_same_without_an_event_loop() -> None:
    with SyncClient(client_for(model_text())) as client:
        deltas = list(client.generate(Request(prompt="hello", sampling=GREEDY, max_tokens=10)))
        assert "".join(delta.content for delta in deltas) == words(DECODER.greedy(ids("hello"), 10))
        assert client.info().model == "fake"
        assert len(client.score(ScoreRequest(prompt="abc")).logprobs) == 3
        with pytest.raises(BadInput, match="lower max_tokens"):
            list(client.generate(Request(prompt="hello", max_tokens=1000)))
    client.close()
    assert TEMPLATE


def test_an_interrupted_answer_is_cancelled_and_the_client_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = HeldDecoder(steps=1)
    with SyncClient(client_for(model_text(), decoder)) as client:
        answer = client.generate(Request(prompt="long", sampling=GREEDY, max_tokens=200))
        next(answer)
        real = client._wait

        def interrupted(awaitable: Any) -> Any:
            monkeypatch.setattr(client, "_wait", real)
            with monkeypatch.context() as patch:
                patch.setattr("concurrent.futures.Future.result", _interrupt)
                return real(awaitable)

        monkeypatch.setattr(client, "_wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(answer)
        decoder.let()
        stats = client.info().stats
        assert stats is not None
        assert (stats.cancelled, stats.running) == (1, 0)
        assert len(list(client.generate(Request(prompt="more", max_tokens=2)))) >= 1


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


@in_loop
async def test_late_requests_end_and_leave_nothing() -> None:
    """One runs, one waits behind it; both have little time, a third has enough."""
    decoder = HeldDecoder(steps=3)
    async with opened(decoder=decoder, max_sequences=1) as client:
        hurried = Request(prompt="hello", sampling=GREEDY, max_tokens=200, deadline_seconds=0.2)
        patient = Request(prompt="hello", sampling=GREEDY, max_tokens=5, deadline_seconds=600.0)
        waiting = [asyncio.create_task(gathered(client, request)) for request in (hurried, hurried, patient)]
        for late in waiting[:2]:
            with pytest.raises(Late):
                await late
        decoder.let()
        assert (await waiting[2]).finish_reason == "length"
        stats = (await client.info()).stats
        assert stats is not None
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        assert stats.late + stats.cancelled == 2


@in_loop
async def test_text_to_tokens_and_back() -> None:
    async with opened() as client:
        asked: Tokenizes = client
        assert await asked.tokenize("hello") == ids("hello")
        assert await asked.tokenize([{"role": "user", "content": "hi"}]) == ids("u.hia.")
        assert await asked.detokenize(ids("hello")) == "hello"
        assert await asked.detokenize([]) == ""
        for wrong in ([-1], [64], [2**40]):
            with pytest.raises(BadInput, match="there is no token"):
                await asked.detokenize(wrong)
        assert not client.is_alive, "no engine is needed for it"
    bare = client_for(None)
    for asking in (bare.tokenize("a"), bare.tokenize([{"role": "user", "content": "hi"}]), bare.detokenize([1])):
        with pytest.raises(BadInput, match="no tokenizer"):
            await asking
    with pytest.raises(BadInput, match="a constraint needs a tokenizer"):
        await gathered(bare, Request(token_ids=(1,), constraint=Constraint(kind="choice", value='["a"]')))
    await bare.close()


@in_loop
async def test_what_is_too_long_is_never_made_into_tokens() -> None:
    text = model_text()
    text.tokenizer.encode = lambda *_, **__: pytest.fail("tokens were made of it")  # type: ignore[method-assign]
    async with opened(text) as client:
        for asked in (Request(prompt="x" * 60_000), Request(messages=({"role": "user", "content": "x" * 60_000},))):
            with pytest.raises(TooLong):
                await gathered(client, asked)
        with pytest.raises(TooLong):
            await client.score(ScoreRequest(prompt="x" * 60_000))


@in_loop
async def test_long_work_does_not_hold_up_the_event_loop() -> None:
    """Whatever is long: text, many messages, tools, ids."""
    threads: list[str] = []
    text = model_text(TEMPLATE + "{{ tools }}")
    async with opened(text) as client:
        for name in ("encode_request", "plain_tokens", "prompt_tokens", "decode"):
            real = getattr(client._text_processor, name)

            def noted(*asked: Any, real: Callable[..., Any] = real) -> Any:
                threads.append(threading.current_thread().name.partition("_")[0])
                return real(*asked)

            setattr(client._text_processor, name, noted)
        empty = {"role": "user", "content": ""}
        tool = {"name": "f", "parameters": {"enum": ["x" * 60_000]}}
        await client.detokenize([1] * 60_000)
        await client.tokenize("x" * 60_000)
        await client.tokenize([{"role": "user", "content": "hello"}] * 9000)
        for asked in (Request(messages=(empty,) * 9000), Request(messages=(empty,), tools=(tool,))):
            with pytest.raises(BadInput):
                await gathered(client, msgspec.structs.replace(asked, max_tokens=1000))
        assert set(threads) == {"windlass-text"}
        threads.clear()
        await client.detokenize([1])
        await gathered(client, Request(messages=(empty,), max_tokens=1))
        assert "windlass-text" not in threads


class Deaf:
    """A port that cannot send."""

    def __init__(self) -> None:
        self.commands: list[Command] = []

    def open(self, receive: Receive, lost: Lost) -> None:
        receive(EngineReady(INFO))

    def send(self, command: Command) -> None:
        self.commands.append(command)
        if isinstance(command, Submit):
            raise OverflowError

    def kill(self) -> None: ...

    async def close(self) -> None: ...


@in_loop
async def test_a_request_that_cannot_be_sent_leaves_nothing() -> None:
    port = Deaf()
    calls = EngineRequests(lambda: port)
    with pytest.raises(OverflowError):
        await anext(calls.outputs(Submit(0, [1])))
    assert calls._connection is not None
    assert not calls._connection.requests
    await calls.close()


@in_loop
async def test_effort_goes_to_a_template_that_knows_it() -> None:
    template = TEMPLATE + "{{ reasoning_effort }}{# <tool_call> #}"
    async with opened(model_text(template)) as client:
        found = await gathered(
            client, Request(messages=({"role": "user", "content": "hi"},), reasoning_effort="high", max_tokens=1)
        )
        assert found.usage is not None
        assert found.usage.prompt_tokens == len("u.hia.high")
    async with opened() as client:
        with pytest.raises(BadInput, match="does not support reasoning_effort"):
            await gathered(client, Request(messages=({"role": "user", "content": "hi"},), reasoning_effort="high"))


@in_loop
async def test_effort_turns_a_switch_where_there_is_no_measure() -> None:
    async with opened(model_text(THINKING_TEMPLATE)) as client:
        for effort, prompt in (("none", "u.hia.N"), ("high", "u.hia.")):
            request = Request(messages=({"role": "user", "content": "hi"},), reasoning_effort=effort, max_tokens=1)
            found = await gathered(client, request)
            assert found.usage is not None
            assert found.usage.prompt_tokens == len(prompt)


@in_loop
async def test_tools_that_cannot_be_called_are_refused() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    messages = ({"role": "user", "content": "hi"},)
    async with opened() as client:
        assert (await client.info()).tools == "convention"
        await gathered(client, Request(messages=messages, tools=(tool,), tool_choice="none", max_tokens=1))
    async with opened(model_text(TEMPLATE + "{{ tools | length }}")) as client:
        with pytest.raises(BadInput, match="tool_choice is 'f', but the tool call format") as found:
            await gathered(client, Request(messages=messages, tools=(tool,), tool_choice="f"))
        assert found.value.field == "tool_choice"
        await gathered(client, Request(messages=messages, tools=(tool,), max_tokens=1))


@in_loop
async def test_reasoning_that_led_to_a_call_is_recalled() -> None:
    """Where the template looks for it, and not beside content."""
    template = "{% for message in messages %}{{ message.thinking }}.{% endfor %}{# <|channel|><|message|> #}"
    called = {"role": "assistant", "reasoning_content": "hm", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    async with opened(model_text(template)) as client:
        assert await client.tokenize([called]) == ids("hm.")
        assert await client.tokenize([called | {"content": "x"}]) == ids(".")
        assert await client.tokenize([{"role": "assistant", "reasoning_content": "hm"}]) == ids(".")
