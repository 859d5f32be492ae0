"""windlass.Client: three lines to the first token, of whatever answers."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import AsyncGenerator
from typing import Any

import pytest

import windlass
from windlass import AsyncClient, Client
from windlass.core.request import Delta, Info, Request, Sampling, ScoreRequest, Scores, TokenLogprob, ToolCall, Usage
from windlass.errors import BadInput, UnknownName
from windlass.wire.client.http_client import HttpClient

USAGE = Usage(prompt_tokens=3, completion_tokens=2)
CALL = ToolCall(id="1", name="f", arguments="{}")
DELTAS = (
    Delta(reasoning="hm", token_ids=(1,)),
    Delta(content="Hello", token_ids=(2,)),
    Delta(content=" you", tool_calls=(CALL,), logprobs=(TokenLogprob(token_id=3, logprob=-1.0),)),
    Delta(finish_reason="length", usage=USAGE),
)


class Scripted:
    """A core Client that says what it is told and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Request | ScoreRequest] = []
        self.is_stopped = self.is_closed = False

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        self.asked.append(request)
        try:
            for delta in DELTAS:
                yield delta
        except GeneratorExit:
            self.is_stopped = True
            raise

    async def score(self, request: ScoreRequest) -> Scores:
        self.asked.append(request)
        return Scores(token_ids=(1,), logprobs=(None,))

    async def info(self) -> Info:
        return Info(model="scripted", context_tokens=10)

    async def close(self) -> None:
        self.is_closed = True


pure = pytest.mark.pure


@pure
def test_a_chat_waits_for_the_whole_answer() -> None:
    scripted = Scripted()
    with Client(scripted) as client:
        answer = client.chat("Hi", temperature=0.5, max_tokens=7, stop="x", seed=3)
        assert client.info().model == "scripted"
    assert str(answer) == answer.content == "Hello you"
    assert (answer.reasoning, answer.tool_calls, answer.finish_reason, answer.usage) == ("hm", (CALL,), "length", USAGE)
    assert (answer.token_ids, len(answer.logprobs)) == ((1, 2), 1)
    assert scripted.is_closed
    assert scripted.asked == [
        Request(
            messages=({"role": "user", "content": "Hi"},),
            sampling=Sampling(temperature=0.5, seed=3),
            max_tokens=7,
            stop=("x",),
        )
    ]


@pure
def test_a_stream_gives_text_and_deltas_give_all() -> None:
    with Client(Scripted()) as client:
        assert list(client.stream("Hi")) == ["Hello", " you"]
        assert list(client.deltas("Hi")) == list(DELTAS)


@pure
def test_who_stops_listening_stops_the_answer() -> None:
    scripted = Scripted()
    with Client(scripted) as client:
        for _ in client.stream("Hi"):
            break
    assert scripted.is_stopped


class Careless(Scripted):
    """Leaves a generator behind, as httpx does with a stream that is not read to its end."""

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        async for number in self._numbers():
            yield Delta(content=str(number))

    async def _numbers(self) -> AsyncGenerator[int, None]:
        try:
            while True:
                yield 1
        finally:
            await asyncio.sleep(0.01)
            self.is_stopped = True


@pure
def test_what_is_left_behind_ends_before_the_client_does(caplog: pytest.LogCaptureFixture) -> None:
    careless = Careless()
    with Client(careless) as client:
        for _ in client.stream("Hi"):
            break
    gc.collect()
    assert careless.is_stopped
    assert caplog.text == ""


@pure
def test_prompts_and_scores() -> None:
    scripted = Scripted()
    with Client(scripted) as client:
        client.complete("Once", max_tokens=1)
        client.complete([1, 2])
        client.score("Once", top=2)
        client.score([1, 2], start=1)
    assert scripted.asked == [
        Request(prompt="Once", max_tokens=1),
        Request(token_ids=(1, 2)),
        ScoreRequest(prompt="Once", top=2),
        ScoreRequest(token_ids=(1, 2), start=1),
    ]


@pure
def test_messages_and_tools_are_those_of_the_api() -> None:
    scripted = Scripted()
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    history = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [called]}]
    with Client(scripted) as client:
        client.chat(history, system="Be brief.", tools=[{"name": "f"}], tool_choice="required")
    [asked] = scripted.asked
    assert isinstance(asked, Request)
    assert asked.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [{**called, "function": {"name": "f", "arguments": {"a": 1}}}]},
    )
    assert asked.tools == ({"type": "function", "function": {"name": "f"}},)


@pure
def test_the_same_without_waiting() -> None:
    async def work() -> None:
        scripted = Scripted()
        async with AsyncClient(scripted) as client:
            answers = await asyncio.gather(*(client.chat("Hi") for _ in range(3)))
            assert [str(answer) for answer in answers] == ["Hello you"] * 3
            assert [piece async for piece in client.stream("Hi")] == ["Hello", " you"]
            assert [delta async for delta in client.deltas("Hi")] == list(DELTAS)
            assert str(await client.complete("x")) == "Hello you"
            assert (await client.score("x")).token_ids == (1,)
            stopped = client.stream("Hi")
            await anext(stopped)
            await stopped.aclose()
            assert scripted.is_stopped
            assert (await client.info()).model == "scripted"
        assert scripted.is_closed

    asyncio.run(work())


@pure
@pytest.mark.parametrize(
    ("asking", "says"),
    [({"temprature": 1}, "temperature"), ({"temperature": -1}, "temperature is -1"), ({"tool_choice": "required"}, "no tools")],
)
def test_what_cannot_be_asked(asking: dict[str, Any], says: str) -> None:
    with Client(Scripted()) as client, pytest.raises(BadInput, match=says):
        client.chat("Hi", **asking)


@pure
def test_a_message_that_is_none() -> None:
    with Client(Scripted()) as client, pytest.raises(BadInput, match=r"messages\[0\]\.role"):
        client.chat([{"content": "Hi"}])


@pure
@pytest.mark.parametrize(
    ("where", "opening", "says"),
    [
        ("http://a", {"device": "cpu"}, "device is for a model"),
        ("model.gguf", {"api_key": "x"}, "api_key is for a server"),
        ("./nowhere.gguf", {}, "does not exist"),
        ("http://a", {"api_kye": "x"}, "api_key"),
    ],
)
def test_what_cannot_be_opened(where: str, opening: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        Client(where, **opening)


@pure
@pytest.mark.parametrize("opening", [{"api_key": "x"}, {"device": "cpu"}, {"progress": True}])
def test_a_client_that_is_given_takes_no_options(opening: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="leave it out"):
        Client(Scripted(), **opening)


@pure
def test_an_address_is_a_server() -> None:
    pytest.importorskip("httpx")
    with Client("http://127.0.0.1:9/v1", api_key="x", timeout=1.0, progress=True) as client:
        assert isinstance(client._client._client, HttpClient)  # pyright: ignore[reportPrivateUsage]


@pure
def test_importing_the_package_costs_nothing() -> None:
    code = "import sys, windlass; assert 'msgspec' not in sys.modules; windlass.Client; assert not {'torch', 'httpx'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert {"Client", "AsyncClient"} <= set(windlass.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Cleint'"):
        windlass.Cleint  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(UnknownName):
        Client("x", unknown=1)  # type: ignore[call-arg]


@pytest.mark.cpu
def test_a_model_on_this_machine() -> None:
    pytest.importorskip("torch")
    with Client("tiny-glm", context_tokens=512, max_sequences=2, device="cpu") as client:
        whole = client.chat("Name a colour.", temperature=0, max_tokens=6, logprobs=0)
        assert "".join(client.stream("Name a colour.", temperature=0, max_tokens=6)) == whole.content
        assert whole.usage is not None
        assert len(whole.logprobs) == whole.usage.completion_tokens
        scores = client.score("The sky is blue.")
        assert scores.logprobs[0] is None
        assert scores.total < 0
        again = client.complete(scores.token_ids, max_tokens=2, temperature=0)
        assert again.token_ids == client.complete("The sky is blue.", max_tokens=2, temperature=0).token_ids
