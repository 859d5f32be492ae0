"""Readers of what comes over a network: requests of every API, answers of other servers, frames of the fleet. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fuzz.mutate import Sample, mutate_json, mutate_lines, mutate_msgpack, mutate_parts, mutate_text, words
from fuzz.reader import Reader, put
from windlass.errors import Error
from windlass.wire.schema.errors import ApiError

SERVE = Path(__file__).parents[1] / "tasks" / "serve"
"""Its stand-in for an engine."""
REFUSALS = (Error, ApiError)
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "strict": True, "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}}}  # fmt: skip
COMMON: dict[str, Any] = {
    "model": "m", "temperature": 0.5, "top_p": 0.9, "presence_penalty": 0.1, "frequency_penalty": -0.1, "logit_bias": {"5": 1.5}, "seed": 3,
    "stop": ["x", "\n"], "max_tokens": 16, "n": 2, "stream": True, "stream_options": {"include_usage": True}, "user": "u", "top_k": 5,
    "min_p": 0.1, "repetition_penalty": 1.1, "stop_token_ids": [1], "min_tokens": 1, "ignore_eos": False, "priority": 0,
    "return_token_ids": True,
}  # fmt: skip
CHAT: dict[str, Any] = COMMON | {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ],
    "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True, "logprobs": True, "top_logprobs": 2,
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}},
    "chat_template_kwargs": {"enable_thinking": False},
}  # fmt: skip
CHATS = [
    CHAT,
    {"messages": [{"role": "user", "content": "x"}], "structured_outputs": {"regex": "a+"}, "max_completion_tokens": 3},
    {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    },
]
COMPLETIONS = [
    COMMON | {"prompt": "x", "echo": True, "logprobs": 2},
    {"prompt": [[1, 2], [3]]},
    {"prompt": ["a", "b"], "suffix": None},
]
RESPONSES = [
    {"model": "m", "input": "hi", "instructions": "i", "max_output_tokens": 5, "temperature": 1, "store": False, "stream": True,
     "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}], "tool_choice": "auto",
     "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}, "reasoning": {"effort": "low"}},
    {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
               {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
               {"type": "function_call_output", "call_id": "c", "output": "1"},
               {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "x"}]}]},
]  # fmt: skip
MESSAGES = [
    {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "s"}],
        "stop_sequences": ["x"],
        "stream": True,
        "metadata": {"user_id": "u"},
        "messages": [
            {"role": "user", "content": "x"},
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "1"}]}],
            },
        ],
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any"},
        "thinking": {"type": "enabled", "budget_tokens": 5},
    },
]
OLLAMA = [
    {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": False, "format": {"type": "object"}, "think": True,
     "options": {"num_predict": 5, "temperature": 0.1, "stop": ["x"], "num_ctx": 512}, "keep_alive": "5m", "tools": [TOOL]},
    {"model": "m", "prompt": "x", "raw": True, "options": {"seed": 1}},
]  # fmt: skip


def samples_of(values: Sequence[object]) -> Callable[[Path], list[Sample]]:
    return lambda folder: [(json.dumps(value).encode(),) for value in values]


# --- requests


def read_chat(data: bytes, folder: Path) -> None:
    from windlass.wire.decode import decode
    from windlass.wire.schema.chat import ChatRequest
    from windlass.wire.server.requests import chat_to_request, expand_n

    body = decode(data, ChatRequest)
    expand_n(chat_to_request(body), body.n or 1)


def read_completion(data: bytes, folder: Path) -> None:
    from windlass.wire.decode import decode
    from windlass.wire.schema.completions import CompletionRequest
    from windlass.wire.server.requests import completion_to_requests

    completion_to_requests(decode(data, CompletionRequest))


def read_responses(data: bytes, folder: Path) -> None:
    from windlass.wire.decode import decode
    from windlass.wire.responses.request import input_items, responses_to_chat
    from windlass.wire.responses.schema import ResponsesRequest
    from windlass.wire.server.requests import chat_to_request

    body = decode(data, ResponsesRequest)
    input_items(body)
    chat_to_request(responses_to_chat(body))


def read_messages(data: bytes, folder: Path) -> None:
    from windlass.wire.anthropic.request import messages_to_chat, unenforced
    from windlass.wire.anthropic.schema import MessagesRequest
    from windlass.wire.decode import decode
    from windlass.wire.server.requests import chat_to_request

    body = decode(data, MessagesRequest)
    unenforced(body)
    chat_to_request(messages_to_chat(body))


def read_ollama(data: bytes, folder: Path) -> None:
    from windlass.wire.decode import decode
    from windlass.wire.ollama.request import generate_to_chat, generate_to_completion, ollama_to_chat, unenforced
    from windlass.wire.ollama.schema import OllamaChatRequest, OllamaGenerateRequest
    from windlass.wire.server.requests import chat_to_request, completion_to_requests

    if b'"messages"' in data:
        body = decode(data, OllamaChatRequest)
        unenforced(body)
        chat_to_request(ollama_to_chat(body, 4096))
    else:
        other = decode(data, OllamaGenerateRequest)
        chat_to_request(generate_to_chat(other, 4096))
        completion_to_requests(generate_to_completion(other, 4096))


def read_others(data: bytes, folder: Path) -> None:
    """Small requests: each of them as each kind."""
    from windlass.wire.decode import decode
    from windlass.wire.ollama.schema import OllamaEmbedRequest, OllamaModelRequest
    from windlass.wire.schema.embeddings import EmbeddingRequest, RerankRequest
    from windlass.wire.schema.tokens import DetokenizeRequest, TokenizeRequest

    for kind in (EmbeddingRequest, RerankRequest, TokenizeRequest, DetokenizeRequest, OllamaEmbedRequest, OllamaModelRequest):
        with contextlib.suppress(*REFUSALS):
            decode(data, kind)


SERVED = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
    "/v1/embeddings",
    "/tokenize",
    "/v1/batches",
)


def _served_samples(folder: Path) -> list[Sample]:
    bodies = [
        CHAT,
        COMPLETIONS[0],
        RESPONSES[0],
        MESSAGES[0],
        OLLAMA[0],
        {"input": ["x"]},
        {"prompt": "x"},
        {"input_file_id": "f", "endpoint": SERVED[0]},
    ]
    return [(json.dumps({"path": path, "body": body | ({"stream": False} if "stream" in body else {})}).encode(),)
            for path, body in zip(SERVED, bodies, strict=True)]  # fmt: skip


def mutate_served(random: Any, samples: Sequence[Sample]) -> bytes:
    """A path, a line and the body: the path stays one that exists."""
    given = json.loads(b"".join(random.choice(samples)))
    return given["path"].encode() + b"\n" + mutate_json(random, [(json.dumps(given["body"]).encode(),)])


_PARTS: dict[str, Any] = {}


def read_served(data: bytes, folder: Path) -> None:
    """The whole application with a client that invents answers: no answer of 500, whatever was asked."""
    path, _, body = data.partition(b"\n")
    if path.decode("latin-1") not in SERVED:
        return
    loop = _PARTS.setdefault("loop", asyncio.new_event_loop())
    loop.run_until_complete(_ask(path.decode(), body))


async def _ask(path: str, body: bytes) -> None:
    if "app" not in _PARTS:
        sys.path.insert(0, str(SERVE))
        from fake import FakeClient

        from windlass.model.formats.disk.atomic import write_atomically
        from windlass.tasks.serve.app import make_app, service_of
        from windlass.tasks.serve.monitor.log import Log
        from windlass.tasks.serve.settings import ServerSettings

        class _Silent(Log):
            def line(self, text: str) -> None:
                text.encode()

        app = make_app(FakeClient(), ServerSettings(), log=_Silent(), write_file=write_atomically)
        _PARTS["life"] = app.router.lifespan_context(app)
        await _PARTS["life"].__aenter__()
        await service_of(app).supervisor.wait_ready()
        _PARTS["app"] = app
    statuses: list[int] = []
    sent = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if sent:
            return sent.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    await _PARTS["app"](scope, receive, send)
    assert statuses and statuses[0] not in (500, 502), statuses


# --- HTTP around them


def read_form(data: bytes, folder: Path) -> None:
    from windlass.tasks.serve.batch.endpoints import form_fields

    head, _, body = data.partition(b"\n")
    form_fields(head.decode("latin-1"), body)


FORM = (
    b"multipart/form-data; boundary=xx\n--xx\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--xx\r\n"
    b"Content-Disposition: form-data; name=\"file\"; filename=\"a.jsonl\"\r\nContent-Type: application/jsonl\r\n\r\n{}\r\n--xx--\r\n"
)  # fmt: skip


def read_headers(data: bytes, folder: Path) -> None:
    from windlass.tasks.serve.http.api_keys import key_number
    from windlass.tasks.serve.http.origin import allows_host, allows_origin, cors_headers, host_name, own_names
    from windlass.wire.client.errors import read_retry_after

    lines = [line.decode("latin-1") for line in data.split(b"\n")]
    for line in lines:
        host_name(line)
        allows_host(line, own_names("127.0.0.1", ("example.org",)))
        allows_origin(line, lines[0])
        cors_headers(line, ("https://a.example",), lines[-1])
        read_retry_after(line)
    key_number([(b"authorization", line.encode("latin-1")) for line in lines], ())


def _batch_samples(folder: Path) -> list[Sample]:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHATS[1]}
    return [tuple(json.dumps(line | {"custom_id": f"{number}"}).encode() + b"\n" for number in range(3))]


def read_batch(data: bytes, folder: Path) -> None:
    from windlass.tasks.serve.batch.batches import read_lines

    for line in read_lines(put(folder, "batch.jsonl", data)):
        read_chat(bytes(line.body), folder)


# --- answers of other servers

CHUNK = {
    "id": "x",
    "object": "chat.completion.chunk",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "delta": {
                "role": "assistant",
                "content": "a",
                "reasoning_content": "r",
                "tool_calls": [{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{"}}],
            },
            "finish_reason": None,
            "token_ids": [5],
            "logprobs": {
                "content": [
                    {
                        "token": "a",
                        "logprob": -0.1,
                        "bytes": [97],
                        "top_logprobs": [{"token": "b", "logprob": -2.0, "bytes": [98]}],
                    }
                ]
            },
        }
    ],
}
LAST = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}], "usage": {
    "prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 1}}}  # fmt: skip
TEXT = {"choices": [{"index": 0, "text": "a", "finish_reason": "stop", "logprobs": {"tokens": ["a"], "token_logprobs": [-0.5], "text_offset": [0],
        "top_logprobs": [{"a": -0.5, "b": -1.5}]}}], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}  # fmt: skip


def _stream_samples(folder: Path) -> list[Sample]:
    events = [CHUNK, CHUNK, LAST]
    return [(*(b"data: " + json.dumps(one).encode() + b"\n\n" for one in events), b": ping\n\n", b"data: [DONE]\n\n")]


def mutate_stream(random: Any, samples: Sequence[Sample]) -> bytes:
    if random.random() < 0.3:
        return mutate_parts(random, samples)
    events = [CHUNK, LAST, TEXT]
    return b"".join(b"data: " + mutate_json(random, [(json.dumps(one).encode(),)]) + b"\n\n" for one in random.sample(events, 3))


def read_stream(data: bytes, folder: Path) -> None:
    from windlass.wire.client.stream_reader import ChatReader, CompletionReader
    from windlass.wire.sse import DONE, EventParser

    parser, chat = EventParser(), ChatReader()
    step = 1 + len(data) // 7
    found = [event for at in range(0, len(data), step) for event in parser.feed(data[at : at + step])]
    for event in found:
        if event == DONE:
            break
        for reader in (chat, CompletionReader()):
            with contextlib.suppress(*REFUSALS):
                reader.add(event)
    with contextlib.suppress(*REFUSALS):
        chat.end()


def read_error_body(data: bytes, folder: Path) -> None:
    from windlass.wire.client.errors import error_from_response, read_error

    detail = read_error(data)
    for status in (None, 302, 400, 401, 429, 503):
        str(error_from_response(status, detail))


ERRORS = [
    {"error": {"message": "m", "type": "t", "param": "p", "code": 3}},
    {"message": "m"},
    {"detail": [{"loc": ["body", 0], "msg": "x"}]},
    {"error": "text"},
]
STATUS = {
    "object": "list",
    "data": [
        {"id": "m", "object": "model", "created": 1, "owned_by": "x", "max_model_len": 4096, "root": "/x", "permission": []}
    ],
}


def read_server_lists(data: bytes, folder: Path) -> None:
    """What other servers say of themselves: their models, their counters."""
    from windlass.tasks.bench.served.client.counters import read_counters, steps_between
    from windlass.wire.client.stream_reader import parse
    from windlass.wire.schema.models import ModelList
    from windlass.wire.schema.tokens import TokenizeResponse

    text = data.decode("utf-8", "replace")
    steps_between(read_counters(text), read_counters(text[::-1]))
    for kind in (ModelList, TokenizeResponse):
        with contextlib.suppress(*REFUSALS):
            parse(data, kind)


METRICS = (
    b"# HELP windlass_engine_steps_total x\n# TYPE windlass_engine_steps_total counter\nwindlass_engine_steps_total 5.0\n"
    b'vllm:generation_tokens_total{model_name="m",engine="0"} 1e+06 1700000000\nvllm:prompt_tokens_total{a="b"} 3\n'
)


# --- the fleet


def _messages(folder: Path) -> list[Sample]:
    from windlass.core.hardware.devices import device
    from windlass.runtime.engine.ranks.messages import RankHeartbeat
    from windlass.runtime.fleet.protocol import messages as fleet
    from windlass.runtime.weights.tensors.slices import Slice
    from windlass.runtime.weights.transfer.pieces import Catalogue, CheckpointPiece

    kinds = {"CheckpointPiece": CheckpointPiece, "Slice": Slice, "Catalogue": Catalogue}
    plain = {name: _plain_value(kind) for name, kind in kinds.items()}
    found: list[Any] = [
        fleet.Heartbeat([fleet.RankReport(0, RankHeartbeat(steps=3, counts={}))]), fleet.Goodbye("x"), fleet.Join(b"1" * 16, "host"),
        fleet.PiecesEnd(1), fleet.PiecesFailed(1, "x"), fleet.EpochKeyFound(1, b"x" * 32), fleet.Joined("n"), fleet.WorkerBusy("x"),
        fleet.ProbeAnswer("n", "10.0.0.1", 8, 2**34, 1e10, "cuda", (device("H100-80GB"),)), fleet.TransferProgress(1, 2, 3),
        fleet.WeightsPrepared(1), fleet.RanksStarted(1, [1, 2]), fleet.RankReady(1, 0), fleet.RankEnded(1, 0, "Stuck", "x"),
        fleet.PutEpochKey(1, "k", b"v"), fleet.TakeEpochKey(1, 2, "k", 3.0), fleet.EndEpoch(1),
    ]  # fmt: skip
    raw = [["PieceData", 1, plain["CheckpointPiece"]], ["PiecesRequest", 1, [plain["Slice"]]],
           ["PrepareWeights", 1, plain["Catalogue"], "f", "/p", [plain["Slice"]]], ["StartRanks", 1, []]]  # fmt: skip
    return [(msgspec.msgpack.encode(one),) for one in [*found, *raw]]


def _plain_value(kind: Any) -> Any:
    """Something of a struct's shape: texts, numbers and lists in the order of its fields."""
    values: list[Any] = []
    for one in msgspec.structs.fields(kind):
        text = str(one.type)
        values.append(
            "x"
            if "str" in text
            else b"x"
            if "bytes" in text
            else []
            if "list" in text or "tuple" in text
            else {}
            if "dict" in text
            else 1
        )
    return (
        values
        if kind.__struct_config__.array_like
        else dict(zip((one.encode_name for one in msgspec.structs.fields(kind)), values, strict=True))
    )


def read_fleet(data: bytes, folder: Path) -> None:
    """A body that is signed correctly, as a worker or root of another version would send it."""
    from windlass.runtime.fleet.protocol.handshake import DECODE_ERRORS
    from windlass.runtime.fleet.protocol.messages import FromRoot, FromWorker

    for kind in (FromRoot, FromWorker):
        with contextlib.suppress(*DECODE_ERRORS):
            msgspec.msgpack.Decoder(kind).decode(data)


def _handshake_samples(folder: Path) -> list[Sample]:
    from windlass.runtime.fleet.protocol.handshake import PROOF_REFUSED, WORKER, Handshake

    other = Handshake(b"s" * 32, WORKER)
    return [(other.hello,), (other.proof(),), (PROOF_REFUSED,)]


def read_handshake(data: bytes, folder: Path) -> None:
    from windlass.runtime.fleet.protocol.handshake import ROOT, Handshake

    own = Handshake(b"s" * 32, ROOT)
    for receive in (own.receive_hello, own.receive_proof):
        with contextlib.suppress(Error):
            receive(data)


def read_channel(data: bytes, folder: Path) -> None:
    """What arrives on an authenticated connection: frames with their signatures."""
    from windlass.runtime.fleet.protocol.channel import Channel, ChannelLost
    from windlass.runtime.fleet.protocol.handshake import SigningKeys
    from windlass.runtime.fleet.protocol.messages import FromWorker

    async def receive() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        channel: Any = Channel(reader, _NoWriter(), SigningKeys(b"a" * 32, b"b" * 32), FromWorker)  # type: ignore[arg-type]
        for _ in range(10):
            await channel.receive()

    with contextlib.suppress(ChannelLost):
        _PARTS.setdefault("loop", asyncio.new_event_loop()).run_until_complete(receive())


class _NoWriter:
    def get_extra_info(self, name: str, default: object = None) -> tuple[str, int]:
        return "127.0.0.1", 1


def _channel_samples(folder: Path) -> list[Sample]:
    from windlass.runtime.fleet.protocol.channel import FrameSigner

    signer = FrameSigner(b"b" * 32)
    parts: list[bytes] = []
    for sample in _messages(folder)[:4]:
        framed = signer.frame(sample[0])
        parts += [framed[:4], framed[4:36], framed[36:]]
    return [tuple(parts)]


def read_frames(data: bytes, folder: Path) -> None:
    from windlass.core.ranks.frames import BadFrame, FrameReader

    reader = FrameReader(max_bytes=2**16)
    with contextlib.suppress(BadFrame):
        for at in range(0, len(data), 7):
            reader.push(data[at : at + 7])


READERS: dict[str, Reader] = {
    "chat-request": Reader(samples_of(CHATS), read_chat, mutate_json, REFUSALS),
    "completion-request": Reader(samples_of(COMPLETIONS), read_completion, mutate_json, REFUSALS),
    "responses-request": Reader(samples_of(RESPONSES), read_responses, mutate_json, REFUSALS),
    "messages-request": Reader(samples_of(MESSAGES), read_messages, mutate_json, REFUSALS),
    "ollama-request": Reader(samples_of(OLLAMA), read_ollama, mutate_json, REFUSALS),
    "small-requests": Reader(
        samples_of(
            [
                {"input": ["a", [1]], "model": "m", "encoding_format": "base64", "dimensions": 3},
                {"query": "a", "documents": ["b"], "top_n": 1},
                {"messages": [{"role": "user", "content": "x"}]},
                {"tokens": [1, 2]},
            ]
        ),
        read_others,
        mutate_json,
        REFUSALS,
    ),
    "server": Reader(_served_samples, read_served, mutate_served, REFUSALS, is_warmed=False),
    "form": Reader(lambda folder: [words(FORM)], read_form),
    "headers": Reader(
        lambda folder: [words(b"localhost:8000\nhttps://a.example\n[::1]:80\nBearer abc\nx-a, x-b\n12.5\n")],
        read_headers,
        refusals=REFUSALS,
    ),
    "batch-file": Reader(_batch_samples, read_batch, mutate_lines, (*REFUSALS, ValueError)),
    "event-stream": Reader(_stream_samples, read_stream, mutate_stream, REFUSALS),
    "error-body": Reader(samples_of(ERRORS), read_error_body, mutate_json, REFUSALS),
    "server-lists": Reader(lambda folder: [(METRICS,), (json.dumps(STATUS).encode(),)], read_server_lists, mutate_text, REFUSALS),
    "fleet-message": Reader(_messages, read_fleet, mutate_msgpack),
    "fleet-handshake": Reader(_handshake_samples, read_handshake, mutate_msgpack),
    "fleet-channel": Reader(_channel_samples, read_channel),
    "frames": Reader(lambda folder: [(b"\0\0\0\3", b"abc", b"\0\0\0\0", b"\0\0\1\0", b"x" * 256)], read_frames),
}
