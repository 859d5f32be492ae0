"""A request body -> engine requests and the writer of their response, for chats and for completions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from windlass.core.client import Client
from windlass.core.request import Delta, Request
from windlass.tasks.serve.api.caller import Caller
from windlass.tasks.serve.api.schema_notes import SchemaNotes
from windlass.tasks.serve.http.asgi import EVENT_STREAM, Header
from windlass.tasks.serve.service import Service
from windlass.wire.decode import decode
from windlass.wire.schema.chat import ChatRequest
from windlass.wire.schema.completions import CompletionRequest
from windlass.wire.schema.errors import ApiError, unsupported
from windlass.wire.schema.sampling import CommonRequest
from windlass.wire.server.requests import chat_to_request, completion_to_requests, expand_n, naming_params
from windlass.wire.server.responses import ChatStream, CompletionStream, Echo, chat_response, completion_response, new_envelope

WriteResponse = Callable[[Sequence[Sequence[Delta]]], bytes]


class EventWriter(Protocol):
    def event(self, index: int, delta: Delta) -> bytes: ...

    def ending(self) -> bytes: ...

    def failed(self, refusal: ApiError) -> bytes:
        """Ends a failed stream."""
        ...


class ResponseWriter(msgspec.Struct, frozen=True):
    events: EventWriter | None
    """For a streamed response."""
    whole: WriteResponse
    """For a complete one."""


class GenerationJob(msgspec.Struct, frozen=True):
    body: object
    """In which errors name parameters."""
    requests: list[Request]
    """One per choice."""
    writer: Callable[[], Awaitable[ResponseWriter]]
    """Called after admission, because an echoed prompt may have to be tokenized."""
    headers: tuple[Header, ...] = ()
    verdict: Callable[[Sequence[Sequence[Delta]]], list[Header]] = lambda choices: []
    """Headers that depend on the complete answer."""
    media_type: bytes = EVENT_STREAM
    """Of a streamed response."""
    finished: Callable[[Sequence[Sequence[Delta]]], None] | None = None
    """Called with the complete answer, streamed or not."""
    params: Mapping[str, str] = {}
    """Names of a chat's parameters in the API of this job."""


UNLIMITED_TOKENS = 512
"""Assumed length of an answer that has no limit."""
CHARACTERS_PER_TOKEN = 4


def expected_tokens(job: GenerationJob, num_bytes: int) -> int:
    """What a request may use, for the limits of its key: its prompt, by the size of the body, and its longest answer."""
    answers = sum(UNLIMITED_TOKENS if one.max_tokens is None else one.max_tokens for one in job.requests)
    return num_bytes // CHARACTERS_PER_TOKEN + answers


MakeJob = Callable[[Service, bytes, Caller], GenerationJob]


def chat_job(service: Service, raw: bytes, caller: Caller) -> GenerationJob:
    body = decode(raw, ChatRequest)
    adapter = service.check_model(body.model)
    n = body.n or 1
    job = chat_requests(service, body, caller, adapter)
    envelope = new_envelope("chatcmpl", service.shown_model(adapter), service.fingerprint)
    shown = {"logprobs": bool(body.logprobs), "token_ids": bool(body.return_token_ids), "has_stops": bool(body.stop)}

    async def writer() -> ResponseWriter:
        events = ChatStream(envelope, n=n, **_usage_options(body), **shown) if body.stream else None
        return ResponseWriter(events, lambda choices: _encode(chat_response(envelope, choices, **shown)))

    return msgspec.structs.replace(job, writer=writer)


def chat_requests(service: Service, body: ChatRequest, caller: Caller, adapter: str = "") -> GenerationJob:
    """A chat of any API, without the writer of its response."""
    request = chat_to_request(body, service.limits)
    owner = caller.owner(body.user or body.safety_identifier)
    with naming_params(body):
        notes = SchemaNotes(request)
    requests = [_with_owner(one, service, caller, owner, adapter, body.model) for one in expand_n(request, body.n or 1)]
    headers = [*notes.headers, *_tool_header(service, request)]
    return GenerationJob(body, requests, _no_writer, tuple(headers), notes.verdict)


def _tool_header(service: Service, request: Request) -> list[Header]:
    """Says that the model's template has no tools, so that they follow our own convention."""
    is_own = bool(request.tools) and request.tool_choice != "none" and service.info.tools == "convention"
    return [(b"windlass-tools", b"convention")] if is_own else []


async def _no_writer() -> ResponseWriter:
    raise AssertionError("a job needs the writer of its response")


def completion_job(service: Service, raw: bytes, caller: Caller) -> GenerationJob:
    body = decode(raw, CompletionRequest)
    adapter = service.check_model(body.model)
    job = completion_requests(service, body, caller, adapter)
    return msgspec.structs.replace(job, writer=partial(_completion_writer, service, body, job.requests, adapter))


def completion_requests(service: Service, body: CompletionRequest, caller: Caller, adapter: str = "") -> GenerationJob:
    """Without the writer of its response."""
    owner = caller.owner(body.user)
    requests = [
        _with_owner(one, service, caller, owner, adapter, body.model) for one in completion_to_requests(body, service.limits)
    ]
    with naming_params(body):
        notes = SchemaNotes(requests[0])
    return GenerationJob(body, requests, _no_writer, tuple(notes.headers), notes.verdict)


async def _completion_writer(
    service: Service, body: CompletionRequest, requests: Sequence[Request], adapter: str
) -> ResponseWriter:
    n = body.n or 1
    envelope = new_envelope("cmpl", service.shown_model(adapter), service.fingerprint)
    shown: dict[str, Any] = {
        "n": n,
        "logprobs": body.logprobs is not None,
        "token_ids": bool(body.return_token_ids),
        "echoes": await _echoes(service.client, requests, n) if body.echo else (),
    }
    events = None
    if body.stream:
        events = CompletionStream(envelope, num_choices=len(requests), **_usage_options(body), **shown)
    return ResponseWriter(events, lambda choices: _encode(completion_response(envelope, choices, **shown)))


_encode = msgspec.json.Encoder().encode


def _usage_options(body: CommonRequest) -> dict[str, bool]:
    options = body.stream_options
    return {
        "include_usage": bool(options and options.include_usage),
        "continuous_usage": bool(options and options.continuous_usage_stats),
    }


def _with_owner(request: Request, service: Service, caller: Caller, owner: str, adapter: str, model: str) -> Request:
    """Different keys do not share cached prefixes: response times would reveal what others asked."""
    salt, priority = request.cache_salt, request.priority
    if len(service.keys) > 1:
        salt = f"{caller.key}:{salt}"
    if caller.key:
        priority = max(priority, service.keys[caller.key - 1].priority)
    used = service.engine_adapter(adapter)
    return msgspec.structs.replace(request, owner=owner, cache_salt=salt, priority=priority, adapter=used, model=model)


async def _echoes(client: Client, requests: Sequence[Request], n: int) -> list[Echo]:
    """One per choice; `n` in a row have the same prompt."""
    return [echo for request in requests[::n] for echo in [await _echo(client, request)] * n]


async def _echo(client: Client, request: Request) -> Echo:
    tokenize, detokenize = getattr(client, "tokenize", None), getattr(client, "detokenize", None)
    if tokenize is None or detokenize is None:
        if request.prompt is None:
            raise unsupported("echo", "of token ids needs a tokenizer, and this model has none here")
        return Echo(text=request.prompt)
    if request.prompt is not None:
        if request.prompt_logprobs is None:
            return Echo(text=request.prompt)
        tokens: list[int] = await tokenize(request.prompt)
        return Echo(text=request.prompt, first_token=await detokenize(tokens[:1]))
    ids = request.token_ids or ()
    return Echo(text=await detokenize(ids), first_token=await detokenize(ids[:1]))
