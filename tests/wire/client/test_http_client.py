"""HttpClient against servers that answer, refuse, break off, hang, and are not there."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from waiting import HUNG_SECONDS

httpx = pytest.importorskip("httpx")

from windlass.core.client import Late, Unavailable  # noqa: E402
from windlass.core.request import Delta, Request, ScoreRequest, TokenLogprob, ToolCall, Usage  # noqa: E402
from windlass.errors import BadInput, Error  # noqa: E402
from windlass.wire.client.connection import ServerAddress  # noqa: E402
from windlass.wire.client.errors import ServerBusy  # noqa: E402
from windlass.wire.client.http_client import HttpClient  # noqa: E402
from windlass.wire.decode import decode  # noqa: E402
from windlass.wire.schema.chat import ChatRequest  # noqa: E402
from windlass.wire.schema.completions import CompletionRequest  # noqa: E402
from windlass.wire.schema.errors import ApiError, error_body  # noqa: E402
from windlass.wire.schema.logprobs import NO_ID  # noqa: E402
from windlass.wire.schema.models import ModelCard, ModelList  # noqa: E402
from windlass.wire.server.requests import chat_to_request, completion_to_requests  # noqa: E402
from windlass.wire.server.responses import (  # noqa: E402
    ChatStream,
    CompletionStream,
    Echo,
    chat_response,
    completion_response,
    error_event,
    new_envelope,
)

pytestmark = pytest.mark.pure

CHAT = Request(messages=({"role": "user", "content": "hi"},))
USAGE = Usage(prompt_tokens=2, completion_tokens=2)
DELTAS = [Delta(content="Hel", token_ids=(1,)), Delta(content="lo", token_ids=(2,)), Delta(finish_reason="stop", usage=USAGE)]
STREAM = {"content-type": "text/event-stream; charset=utf-8"}
MODELS = ModelList(data=[ModelCard(id="m", max_model_len=100)])


class FakeServer:
    """`answer` is asked for everything but the list of models; what was asked is kept."""

    def __init__(self, answer: Callable[[Any], Any] = lambda request: chat_stream(), models: ModelList = MODELS) -> None:
        self.answer, self.models = answer, models
        self.asked: list[Any] = []

    def __call__(self, request: Any) -> Any:
        if request.url.path.endswith("/models"):
            return httpx.Response(200, content=msgspec.json.encode(self.models))
        self.asked.append(request)
        return self.answer(request)


def chat_stream(deltas: list[Delta] = DELTAS, done: bool = True) -> Any:
    stream = ChatStream(new_envelope("chatcmpl", "m"), include_usage=True, token_ids=True)
    body = b"".join(stream.event(0, delta) for delta in deltas)
    return httpx.Response(200, headers=STREAM, content=body + (stream.ending() if done else b""))


def client_of(server: Callable[[Any], Any], **options: Any) -> HttpClient:
    return HttpClient("http://there:1/v1", transport=httpx.MockTransport(server), **options)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    async def within() -> Any:
        async with asyncio.timeout(HUNG_SECONDS):
            return await work

    return asyncio.run(within())


async def all_of(client: HttpClient, request: Request = CHAT) -> list[Delta]:
    try:
        return [delta async for delta in client.generate(request)]
    finally:
        await client.close()


# --- answers ---------------------------------------------------------------------------------------------------------


def test_a_chat_is_streamed() -> None:
    server = FakeServer()
    assert run(all_of(client_of(server, api_key="secret"))) == DELTAS
    [asked] = server.asked
    assert (asked.url.path, asked.headers["authorization"]) == ("/v1/chat/completions", "Bearer secret")


def test_what_is_asked_arrives() -> None:
    server = FakeServer()
    asked = Request(messages=CHAT.messages, max_tokens=9, stop=("x",), thinking=False, deadline_seconds=5.0, ignore_eos=True)
    run(all_of(client_of(server), asked))
    assert chat_to_request(decode(server.asked[0].content, ChatRequest)) == asked


def test_strangers_get_only_what_the_request_needs() -> None:
    server = FakeServer(models=ModelList(data=[ModelCard(id="other", owned_by="someone")]))
    asked = Request(messages=CHAT.messages, deadline_seconds=5.0)
    run(all_of(client_of(server), asked))
    assert msgspec.json.decode(server.asked[0].content).keys() == {
        "model", "messages", "temperature", "top_p", "stream", "stream_options",
    }  # fmt: skip


def completion_stream(request: Any) -> Any:
    stream = CompletionStream(new_envelope("cmpl", "m"), include_usage=True, token_ids=True)
    body = b"".join(stream.event(0, delta) for delta in DELTAS) + stream.ending()
    return httpx.Response(200, headers=STREAM, content=body)


def test_prompts_and_token_ids_are_completions() -> None:
    for asked in (Request(prompt="x", max_tokens=5), Request(token_ids=(1, 2), max_tokens=5)):
        server = FakeServer(completion_stream)
        found = run(all_of(client_of(server), asked))
        assert "".join(delta.content for delta in found) == "Hello"
        assert found[-1].usage == USAGE
        assert server.asked[0].url.path == "/v1/completions"
        assert completion_to_requests(decode(server.asked[0].content, CompletionRequest)) == [asked]


def test_a_prompt_without_a_limit_gets_the_rest_of_the_context() -> None:
    def answer(request: Any) -> Any:
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"count": 3, "max_model_len": 100, "tokens": [1, 2, 3]})
        return completion_stream(request)

    server = FakeServer(answer)
    run(all_of(client_of(server), Request(prompt="x")))
    assert msgspec.json.decode(server.asked[-1].content)["max_tokens"] == 97
    server = FakeServer(answer)
    run(all_of(client_of(server), Request(token_ids=(5,))))
    assert [(request.url.path, msgspec.json.decode(request.content)["max_tokens"]) for request in server.asked] == [
        ("/v1/completions", 99)
    ]
    unsaid = FakeServer(lambda request: httpx.Response(404), models=ModelList(data=[ModelCard(id="m")]))
    with pytest.raises(BadInput, match="max_tokens"):
        run(all_of(client_of(unsaid), Request(prompt="x")))


# --- scoring ---------------------------------------------------------------------------------------------------------

ENTRIES = (None, TokenLogprob(token_id=8, logprob=-0.5, token=" is", top=(TokenLogprob(token_id=9, logprob=-0.2, token=" was"),)))


def echoed(request: Any, new: tuple[Delta, ...] = ()) -> Any:
    if request.url.path == "/tokenize":
        return httpx.Response(200, json={"count": 2, "tokens": [7, 8]})
    usage = Usage(prompt_tokens=2, completion_tokens=len(new))
    deltas = [Delta(prompt_logprobs=ENTRIES), *new, Delta(finish_reason="length", usage=usage)]
    echo = Echo(text="It is", first_token="It")
    body = completion_response(new_envelope("cmpl", "m"), [deltas], logprobs=True, token_ids=True, echoes=[echo])
    return httpx.Response(200, content=msgspec.json.encode(body))


async def scored(client: HttpClient, request: ScoreRequest) -> Any:
    try:
        return await client.score(request)
    finally:
        await client.close()


@pytest.mark.parametrize("prompt", [{"prompt": "It is"}, {"token_ids": (7, 8)}])
def test_scores(prompt: dict[str, Any]) -> None:
    found = run(scored(client_of(FakeServer(echoed)), ScoreRequest(**prompt, top=1)))
    assert found.token_ids == (7, 8)
    best = TokenLogprob(token_id=NO_ID, logprob=-0.2, token=" was")  # the API gives the others as texts
    assert found.logprobs == (None, TokenLogprob(token_id=8, logprob=-0.5, token=" is", top=(best,)))
    assert run(scored(client_of(FakeServer(echoed)), ScoreRequest(**prompt))).logprobs[1].top == ()
    assert run(scored(client_of(FakeServer(echoed)), ScoreRequest(**prompt, start=2))).logprobs == (None, None)


def test_scores_of_a_server_that_writes_a_token_all_the_same() -> None:
    new = Delta(content="!", token_ids=(3,), logprobs=(TokenLogprob(token_id=3, logprob=-1.0, token="!"),))
    server = FakeServer(lambda request: echoed(request, (new,)))
    assert len(run(scored(client_of(server), ScoreRequest(prompt="It is"))).logprobs) == 2


def test_scores_of_a_server_that_tells_no_ids() -> None:
    server = FakeServer(lambda request: httpx.Response(404) if request.url.path == "/tokenize" else echoed(request))
    assert run(scored(client_of(server), ScoreRequest(prompt="It is"))).token_ids == (NO_ID, NO_ID)


def test_a_server_that_cannot_score_says_so() -> None:
    server = FakeServer(lambda request: httpx.Response(200, json={"choices": [{"text": "x", "index": 0}]}))
    with pytest.raises(BadInput, match="log-probabilities"):
        run(scored(client_of(server), ScoreRequest(token_ids=(1,))))


def test_a_server_that_scores_too_little() -> None:
    with pytest.raises(Unavailable, match="the server scored 2 of 3 tokens"):
        run(scored(client_of(FakeServer(echoed)), ScoreRequest(token_ids=(7, 8, 9))))


def test_log_probabilities_of_prompt_and_answer_come_apart() -> None:
    new = Delta(content="!", token_ids=(3,), logprobs=(TokenLogprob(token_id=3, logprob=-1.0, token="!"),))
    for asked in ({"prompt": "It is"}, {"token_ids": (7, 8)}):
        server = FakeServer(lambda request: echoed(request, (new,)))
        request = Request(**asked, max_tokens=1, logprobs=0, prompt_logprobs=1)
        [found] = run(all_of(client_of(server), request))
        assert (found.content, found.token_ids, found.finish_reason) == ("!", (3,), "length")
        assert [one.token for one in found.logprobs] == ["!"]
        assert found.prompt_logprobs is not None
        assert [one.logprob if one else None for one in found.prompt_logprobs] == [None, -0.5]
        assert [one.token_id if one else None for one in found.prompt_logprobs] == [None, 8 if "token_ids" in asked else NO_ID]
    with pytest.raises(BadInput, match="chats"):
        run(all_of(client_of(FakeServer(echoed)), Request(messages=CHAT.messages, prompt_logprobs=0)))


# --- info and tokens -------------------------------------------------------------------------------------------------


async def _info(client: HttpClient) -> Any:
    return await client.info()


def test_the_first_model_is_taken_unless_another_is_named() -> None:
    models = ModelList(data=[ModelCard(id="a", max_model_len=5), ModelCard(id="b", max_model_len=6)])
    assert run(_info(client_of(FakeServer(models=models)))).model == "a"
    found = run(_info(client_of(FakeServer(models=models), model="b")))
    assert (found.model, found.context_tokens) == ("b", 6)
    assert run(_info(client_of(FakeServer(models=models), model="hidden"))).model == "hidden"
    with pytest.raises(Unavailable, match="no model"):
        run(_info(client_of(FakeServer(models=ModelList()))))


def test_a_server_that_lists_nothing_can_be_asked_by_name() -> None:
    assert run(_info(client_of(lambda request: httpx.Response(404), model="m"))).context_tokens == 0
    with pytest.raises(ApiError):
        run(_info(client_of(lambda request: httpx.Response(404))))


def test_tokens_there_and_back() -> None:
    def answer(request: Any) -> Any:
        body = msgspec.json.decode(request.content)
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"count": 2, "tokens": [1, 2] if "prompt" in body else [3]})
        return httpx.Response(200, json={"prompt": str(body["tokens"])})

    async def work() -> None:
        client = client_of(FakeServer(answer))
        assert await client.tokenize("x") == [1, 2]
        assert await client.tokenize([{"role": "user", "content": "x"}]) == [3]
        assert await client.detokenize([4, 5]) == "[4, 5]"

    run(work())


@pytest.mark.parametrize(
    ("url", "api", "root"),
    [
        ("http://a:1", "http://a:1/v1", "http://a:1"),
        ("http://a:1/", "http://a:1/v1", "http://a:1"),
        ("http://a:1/v1", "http://a:1/v1", "http://a:1"),
        ("http://a:1/v1/", "http://a:1/v1", "http://a:1"),
        ("https://a/some/where", "https://a/some/where", "https://a/some/where"),
        ("https://a/some/v1", "https://a/some/v1", "https://a/some"),
    ],
)
def test_addresses(url: str, api: str, root: str) -> None:
    assert (ServerAddress(url).api, ServerAddress(url).root) == (api, root)


@pytest.mark.parametrize("url", ["", "there:8000", "ftp://a", "http://", "http://a?b=c", "http://me:secret@a"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(BadInput) as found:
        HttpClient(url)
    assert "secret" not in str(found.value)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind", "says"),
    [
        (400, ApiError, "too hot"),
        (401, ApiError, "key"),
        (403, ApiError, "key"),
        (404, ApiError, "too hot"),
        (408, Late, "timed out"),
        (413, ApiError, "too hot"),
        (422, ApiError, "too hot"),
        (429, ServerBusy, "in 7 seconds"),
        (500, Unavailable, "failed"),
        (502, Unavailable, "failed"),
        (503, ServerBusy, "in 7 seconds"),
        (504, Late, "timed out"),
        (302, ApiError, "final URL"),
    ],
)
def test_every_status_is_an_error_of_ours(status: int, kind: type[Error], says: str) -> None:
    body = error_body("too hot", param="temperature", code="x")
    server = FakeServer(lambda request: httpx.Response(status, content=body, headers={"retry-after": "7"}))
    with pytest.raises(kind, match=says) as found:
        run(all_of(client_of(server, api_key="secret")))
    assert type(found.value) is kind
    assert "secret" not in str(found.value)
    if isinstance(found.value, ApiError) and status in (400, 404, 413, 422):
        assert (found.value.status, found.value.param, found.value.code) == (status, "temperature", "x")
    if isinstance(found.value, ServerBusy):
        assert found.value.retry_after_seconds == 7


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"message":"plain"}', "plain"),
        (b'{"detail":[{"loc":["body"]}]}', "loc"),
        (b'{"error":"short"}', "short"),
        (b"<html>Bad gateway</html>", "Bad gateway"),
        (b"", "no reason given"),
        (b"\xff\xfe", "failed"),
        (b"x" * 10**6, "xxx"),
    ],
)
def test_errors_in_any_form(body: bytes, says: str) -> None:
    with pytest.raises(Unavailable, match=says) as found:
        run(all_of(client_of(FakeServer(lambda request: httpx.Response(500, content=body)))))
    assert len(str(found.value)) < 700


@pytest.mark.parametrize("retry", ["soon", "-1", "Wed, 21 Oct 2026 07:28:00 GMT", "1e30"])
def test_a_time_to_ask_again_that_is_no_number_of_seconds(retry: str) -> None:
    server = FakeServer(lambda request: httpx.Response(429, headers={"retry-after": retry}))
    with pytest.raises(ServerBusy) as found:
        run(all_of(client_of(server)))
    assert found.value.retry_after_seconds is None


# --- streams that break ----------------------------------------------------------------------------------------------


def test_a_stream_that_ends_too_early() -> None:
    with pytest.raises(Unavailable, match="interrupted"):
        run(all_of(client_of(FakeServer(lambda request: chat_stream(DELTAS[:1], done=False)))))


def test_an_error_in_the_middle_of_a_stream() -> None:
    def answer(request: Any) -> Any:
        found = chat_stream(DELTAS[:1], done=False)
        return httpx.Response(200, headers=STREAM, content=found.content + error_event("the engine crashed"))

    with pytest.raises(Unavailable, match="the engine crashed"):
        run(all_of(client_of(FakeServer(answer))))


def test_a_server_that_does_not_stream() -> None:
    with pytest.raises(Unavailable, match="did not"):
        run(all_of(client_of(FakeServer(lambda request: httpx.Response(200, json={"choices": []})))))


def test_a_closed_client_says_so() -> None:
    async def work() -> None:
        client = client_of(FakeServer())
        await client.close()
        with pytest.raises(Unavailable, match="closed"):
            await client.info()

    run(work())


# --- real connections ------------------------------------------------------------------------------------------------

LISTING = msgspec.json.encode(MODELS)


@asynccontextmanager
async def listening(stream: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]) -> AsyncIterator[str]:
    """A server of its own that gives `stream` the connection of every request but that for the models."""

    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not (head := await reader.readuntil(b"\r\n\r\n")).startswith(b"POST"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(LISTING), LISTING))
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        await stream(reader, writer)

    async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except asyncio.IncompleteReadError:
            pass  # a connection that was kept for later
        finally:
            writer.close()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.create_task(closing(reader, writer)))

    server = await asyncio.start_server(begin, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await asyncio.gather(*tasks)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PIECE = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
CHUNK = b"%x\r\n%s\r\n" % (len(PIECE), PIECE)


async def _take(generator: AsyncGenerator[Delta, None], count: int) -> list[Delta]:
    return [await anext(generator) for _ in range(count)]


def test_a_connection_that_breaks_in_the_middle() -> None:
    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + CHUNK)
        await writer.drain()

    async def work() -> None:
        async with listening(stream) as url:
            client = HttpClient(url)
            answer = client.generate(CHAT)
            assert (await anext(answer)).content == "x"
            with pytest.raises(Unavailable, match="was lost"):
                await anext(answer)
            await client.close()

    run(work())


@pytest.mark.parametrize("how", ["closed", "cancelled"])
def test_who_stops_listening_closes_the_connection(how: str) -> None:
    gone = asyncio.Event()

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + CHUNK)
        await writer.drain()
        assert await reader.read() == b""  # the other end is closed
        gone.set()

    async def work() -> None:
        async with listening(stream) as url:
            client = HttpClient(url)
            answer = client.generate(CHAT)
            await anext(answer)
            if how == "closed":
                await answer.aclose()
            else:
                task = asyncio.create_task(_take(answer, 1))
                await asyncio.sleep(0.05)
                task.cancel()
            await gone.wait()
            await client.close()

    run(work())


async def _silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + CHUNK)
    await writer.drain()
    await reader.read()


def test_a_server_that_falls_silent() -> None:
    async def work() -> None:
        async with listening(_silent) as url:
            client = HttpClient(url, timeout=1.0)
            with pytest.raises(Unavailable, match=r"no data for 1 seconds"):
                await _take(client.generate(CHAT), 2)
            await client.close()

    run(work())


def test_a_deadline_that_passes() -> None:
    async def work() -> None:
        async with listening(_silent) as url:
            client = HttpClient(url)
            with pytest.raises(Late):
                await _take(client.generate(msgspec.structs.replace(CHAT, deadline_seconds=1.0)), 2)
            await client.close()

    run(work())


def test_nobody_is_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        client = HttpClient(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(Unavailable, match="unreachable"):
            run(all_of(client))


# --- answers as a whole ----------------------------------------------------------------------------------------------


def joined(deltas: list[Delta]) -> tuple[Any, ...]:
    """What the deltas of an answer say together."""
    texts = ("".join(delta.content for delta in deltas), "".join(delta.reasoning for delta in deltas))
    ids = tuple(token for delta in deltas for token in delta.token_ids)
    calls = [(call.name, call.arguments) for delta in deltas for call in delta.tool_calls]
    return *texts, ids, calls, deltas[-1].finish_reason, deltas[-1].usage


def test_a_whole_chat_says_the_same_as_a_streamed_one() -> None:
    call = ToolCall(id="c", name="weather", arguments='{"city": "Paris"}')
    deltas = [
        Delta(reasoning="Hm.", token_ids=(1,)),
        Delta(content="Hello", token_ids=(2,)),
        Delta(tool_calls=(call,), finish_reason="stop", usage=USAGE),
    ]

    def whole(request: Any) -> Any:
        answer = chat_response(new_envelope("chatcmpl", "m"), [deltas], token_ids=True)
        return httpx.Response(200, content=msgspec.json.encode(answer))

    server = FakeServer(whole)
    found = run(all_of(client_of(server, streams=False)))
    assert joined(found) == joined(deltas)
    asked = msgspec.json.decode(server.asked[0].content)
    assert "stream" not in asked and "stream_options" not in asked


def test_a_whole_completion_and_an_error_in_place_of_one() -> None:
    def whole(request: Any) -> Any:
        answer = completion_response(new_envelope("cmpl", "m"), [DELTAS], token_ids=True)
        return httpx.Response(200, content=msgspec.json.encode(answer))

    found = run(all_of(client_of(FakeServer(whole), streams=False), Request(prompt="x", max_tokens=4)))
    assert joined(found) == joined(DELTAS)
    with pytest.raises(ServerBusy):
        run(all_of(client_of(FakeServer(lambda _: httpx.Response(429, content=error_body("full", code="x"))), streams=False)))
    with pytest.raises(Unavailable, match="invalid response"):
        run(all_of(client_of(FakeServer(lambda _: httpx.Response(200, content=b"{")), streams=False)))
