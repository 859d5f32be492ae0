"""Endpoints other than generation: models, tokenize, health, metrics, status."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from windlass.core.client import Tokenizes
from windlass.errors import Error
from windlass.tasks.serve.api.caller import caller_of, request_id
from windlass.tasks.serve.api.interrupt import interruptible
from windlass.tasks.serve.api.status import status
from windlass.tasks.serve.http import errors
from windlass.tasks.serve.http.asgi import EVENT_STREAM, Header, response_start, retry_after, send_response
from windlass.tasks.serve.service import Service, cancelled_error
from windlass.wire.decode import decode
from windlass.wire.messages import from_messages
from windlass.wire.schema.errors import ApiError, invalid, unsupported
from windlass.wire.schema.models import ModelCard, ModelList, model_card
from windlass.wire.schema.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from windlass.wire.server.requests import naming_params
from windlass.wire.sse import event

LIVE_SECONDS = 1.0
TOKENS_PER_TURN = 256
METRICS_TYPE = b"text/plain; version=1.0.0; charset=utf-8"
Handler = Callable[[Service, Scope, Receive, Send], Awaitable[None]]


class Endpoint:
    """An ASGI application made of a handler. A class, because Starlette takes a plain function for a request-response endpoint."""

    def __init__(self, service: Service, handler: Handler) -> None:
        self._service, self._handler = service, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._handler(self._service, scope, receive, send)
        except ApiError:
            raise
        except Error as error:
            raise self._service.api_error(error, request_id=request_id(scope)) from None


async def health(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Liveness; a draining server is still healthy."""
    await _health(send, service, _is_up(service))


async def ready(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Readiness: whether new requests are accepted."""
    await _health(send, service, _is_up(service) and not service.draining.is_set())


def _is_up(service: Service) -> bool:
    """Of several models: whether one is loaded, or was and can be again."""
    if service.models is None:
        return service.supervisor.is_ready
    return any(one.slot.loads and one.slot.error is None for one in service.group)


class HealthBody(msgspec.Struct):
    status: str
    """`ok` or `unavailable`."""
    state: str


async def _health(send: Send, service: Service, is_ok: bool) -> None:
    body = HealthBody("ok" if is_ok else "unavailable", service.state)
    after = [] if is_ok else [retry_after(service.supervisor.retry_seconds)]
    await send_json(send, body, 200 if is_ok else 503, after)


async def send_json(send: Send, value: Any, code: int = 200, headers: list[Header] | None = None) -> None:
    await send_response(send, code, msgspec.json.encode(value), headers=headers or ())


async def models(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, ModelList(data=[card for one in service.group for card in _cards(one)]))


async def model(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    name = scope["path_params"]["model"]
    cards = [card for one in service.group for card in _cards(one)]
    found = next((card for card in cards if card.id == name), None)
    if found is None:
        raise errors.unknown_model(service.names)
    await send_json(send, found)


def _cards(service: Service) -> list[ModelCard]:
    """The model, its adapters as vLLM shows them, and what a router can be asked for."""
    own = _card(service)
    names = [service.shown_model(adapter) for adapter in service.adapters]
    routed = [msgspec.structs.replace(own, id=name) for name in service.routed_names]
    return [own, *(msgspec.structs.replace(own, id=name, parent=own.id) for name in names), *routed]


def _card(service: Service) -> ModelCard:
    if service.models is None:
        return model_card(service.info, service.created, service.model)
    info, state = service.supervisor.info, service.slot.state
    if info is None:
        return ModelCard(id=service.model, created=service.created, state=state)
    return msgspec.structs.replace(model_card(info, service.created, service.model), state=state)


async def metrics(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    aliased = service.model if service.settings.metric_aliases else None
    await send_response(send, 200, service.metrics.text(aliased), METRICS_TYPE)


# --- tokens ----------------------------------------------------------------------------------------------------------


async def tokenize(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    raw = await ready_body(service, scope, receive)
    body = await service.body_reader.parsed(raw, lambda raw: decode(raw, TokenizeRequest))
    service.check_model(body.model)
    client, length = tokenizer_of(service), service.info.context_tokens
    caller = caller_of(scope)
    with admitted_tokens(service, caller.share), naming_params(body):
        async with interruptible(receive, service.settings.deadline_seconds):
            text = await asyncio.to_thread(_text_of, body)
            is_plain = body.prompt is not None and body.add_special_tokens is False
            owner = caller.owner()
            tokens = await (client.tokenize(text, special=False, owner=owner) if is_plain else client.tokenize(text, owner=owner))
            strings = await _strings(client, tokens) if body.return_token_strs else msgspec.UNSET
    await send_json(send, TokenizeResponse(count=len(tokens), max_model_len=length, tokens=tokens, token_strs=strings))


async def _strings(client: Tokenizes, tokens: Sequence[int]) -> list[str]:
    strings: list[str] = []
    for token in tokens:
        if len(strings) % TOKENS_PER_TURN == 0:  # the client may never suspend, and would block the event loop
            await asyncio.sleep(0)
        strings.append(await client.detokenize([token]))
    return strings


@contextmanager
def admitted_tokens(service: Service, share: str) -> Generator[None]:
    """Tokenizing counts as a request in flight: many large texts at once would starve generation."""
    with service.admitted(1, share, is_timed=False) as flight:
        try:
            yield
        except asyncio.CancelledError:
            if not flight.was_cancelled():
                raise
            raise cancelled_error(flight.cancel_reason) from None


def _text_of(body: TokenizeRequest) -> Any:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "or messages is required, exactly one of them")
    if body.prompt is not None:
        if body.add_generation_prompt is not None:
            raise invalid("add_generation_prompt", "is only valid with messages")
        return body.prompt
    if body.add_generation_prompt is False:
        raise unsupported("add_generation_prompt", "cannot be false: messages are rendered with the generation prompt")
    if body.add_special_tokens is True:
        raise unsupported("add_special_tokens", "cannot be true for messages: the chat template adds the special tokens")
    return from_messages(body.messages or ())


async def detokenize(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    raw = await ready_body(service, scope, receive)
    body = await service.body_reader.parsed(raw, lambda raw: decode(raw, DetokenizeRequest))
    service.check_model(body.model)
    client, size = tokenizer_of(service), service.info.vocab_size
    highest = max(body.tokens, default=0)
    if size and highest >= size:
        raise invalid(
            f"tokens[{body.tokens.index(highest)}]", f"is {highest}, which is outside the vocabulary of {size:,} tokens"
        )
    with admitted_tokens(service, caller_of(scope).share), naming_params(body):
        async with interruptible(receive, service.settings.deadline_seconds):
            text = await client.detokenize(body.tokens)
    await send_json(send, DetokenizeResponse(prompt=text))


async def ready_body(service: Service, scope: Scope, receive: Receive) -> bytes:
    body = await service.body_reader.read(scope, receive)
    if service.models is None:
        _ = service.info  # raises 503 if the engine is not ready
    return body


def tokenizer_of(service: Service) -> Tokenizes:
    client: Any = service.client
    if not hasattr(client, "tokenize") or not service.info.has_text:
        raise ApiError("the tokenizer of this model is not available", code="no_tokenizer", status=404)
    return client


# --- for the page ----------------------------------------------------------------------------------------------------


async def get_status(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, status(service))


async def live(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """The status every second, until the client disconnects or the server shuts down."""
    await send(response_start(200, EVENT_STREAM))
    disconnected = asyncio.create_task(_wait_disconnect(receive))
    draining = asyncio.create_task(service.draining.wait())
    try:
        while not disconnected.done():
            data = event(msgspec.json.encode(status(service)))
            is_last = draining.done()
            await send({"type": "http.response.body", "body": data, "more_body": not is_last})
            if is_last:
                break
            await asyncio.wait({disconnected, draining}, timeout=LIVE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    finally:
        disconnected.cancel()
        draining.cancel()


async def _wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
