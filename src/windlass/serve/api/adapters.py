"""A body -> what the engine is asked and how its deltas become an answer. Knows the API's two kinds, chats and completions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec

from windlass.core.client import Client
from windlass.core.request import Delta, Request
from windlass.serve.service import OWNER_CHARACTERS, Service
from windlass.wire.decode import decode
from windlass.wire.schema.chat import ChatRequest
from windlass.wire.schema.completions import CompletionRequest
from windlass.wire.schema.errors import unsupported
from windlass.wire.schema.sampling import CommonRequest
from windlass.wire.server.requests import chat_to_request, completion_to_requests, copies
from windlass.wire.server.responses import ChatStream, CompletionStream, Echo, chat_response, completion_response, new_envelope

Whole = Callable[[Sequence[Sequence[Delta]]], bytes]


class Events(Protocol):
    def event(self, index: int, delta: Delta) -> bytes: ...

    def ending(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Form:
    """Of an answer."""

    events: Events | None
    """Where it is streamed."""
    whole: Whole


@dataclass(frozen=True, slots=True)
class Job:
    body: CommonRequest
    requests: list[Request]
    """One per choice."""
    form: Callable[[], Awaitable[Form]]
    """To be asked for once the request was let in: a prompt that is echoed may have to be cut into tokens."""


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks: the number of the key and the client's address."""

    key: int
    address: str


MakeJob = Callable[[Service, bytes, Asker], Job]


def chat_job(service: Service, raw: bytes, asker: Asker) -> Job:
    body = decode(raw, ChatRequest)
    service.check_model(body.model)
    n = body.n or 1
    owner = _owner(asker, body.user or body.safety_identifier)
    requests = [_owned(one, service, asker, owner) for one in copies(chat_to_request(body, service.limits), n)]
    envelope = new_envelope("chatcmpl", service.model)
    shown = {"logprobs": bool(body.logprobs), "token_ids": bool(body.return_token_ids), "has_stops": bool(body.stop)}

    async def form() -> Form:
        events = ChatStream(envelope, n=n, include_usage=_include_usage(body), **shown) if body.stream else None
        return Form(events, lambda choices: _encode(chat_response(envelope, choices, **shown)))

    return Job(body, requests, form)


def completion_job(service: Service, raw: bytes, asker: Asker) -> Job:
    body = decode(raw, CompletionRequest)
    service.check_model(body.model)
    owner = _owner(asker, body.user)
    requests = [_owned(one, service, asker, owner) for one in completion_to_requests(body, service.limits)]
    return Job(body, requests, partial(_completion_form, service, body, requests))


async def _completion_form(service: Service, body: CompletionRequest, requests: Sequence[Request]) -> Form:
    n = body.n or 1
    envelope = new_envelope("cmpl", service.model)
    shown: dict[str, Any] = {
        "n": n,
        "logprobs": body.logprobs is not None,
        "token_ids": bool(body.return_token_ids),
        "echoes": await _echoes(service.client, requests, n) if body.echo else (),
    }
    events = None
    if body.stream:
        events = CompletionStream(envelope, num_choices=len(requests), include_usage=_include_usage(body), **shown)
    return Form(events, lambda choices: _encode(completion_response(envelope, choices, **shown)))


_encode = msgspec.json.Encoder().encode


def _include_usage(body: CommonRequest) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


def _owner(asker: Asker, user: str | None) -> str:
    """Shares of the engine are per key, and per user where the key's holder names them; otherwise per address."""
    return f"{asker.key}:{(user or asker.address)[:OWNER_CHARACTERS]}"


def _owned(request: Request, service: Service, asker: Asker, owner: str) -> Request:
    """Holders of different keys do not share cached prefixes: how quick an answer is would tell one what another asked."""
    salt = request.cache_salt
    if len(service.settings.api_keys) > 1:
        salt = f"{asker.key}:{salt}"
    return msgspec.structs.replace(request, owner=owner, cache_salt=salt)


async def _echoes(client: Client, requests: Sequence[Request], n: int) -> list[Echo]:
    """Of every choice; `n` in a row have the same prompt."""
    return [echo for request in requests[::n] for echo in [await _echo(client, request)] * n]


async def _echo(client: Client, request: Request) -> Echo:
    tokenize, detokenize = getattr(client, "tokenize", None), getattr(client, "detokenize", None)
    if tokenize is None or detokenize is None:
        if request.prompt is None:
            raise unsupported("echo", "of token ids needs a tokenizer, which this model does not have here")
        return Echo(text=request.prompt)
    if request.prompt is not None:
        if request.prompt_logprobs is None:
            return Echo(text=request.prompt)
        tokens: list[int] = await tokenize(request.prompt)
        return Echo(text=request.prompt, first_token=await detokenize(tokens[:1]))
    ids = request.token_ids or ()
    return Echo(text=await detokenize(ids), first_token=await detokenize(ids[:1]))
