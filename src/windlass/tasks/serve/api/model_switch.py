"""In a server of several models: the body's `model` decides which of them answers. A request waits here while its model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windlass.errors import Error
from windlass.tasks.serve.api.caller import request_id
from windlass.tasks.serve.api.interrupt import interruptible
from windlass.tasks.serve.api.route import ApiRoute
from windlass.tasks.serve.http import errors
from windlass.tasks.serve.service import Service

TAG = ":latest"
"""Ollama's clients add it to names."""
WAITED = b"windlass-waited"


class _Named(msgspec.Struct):
    model: str = ""
    name: str = ""
    """Ollama's older name of the field."""


_decode = msgspec.json.Decoder(_Named).decode


def named_model(raw: bytes) -> str:
    """Empty: none, or a body that is invalid, which its endpoint will say."""
    try:
        found = _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return found.model or found.name


def service_for(group: Sequence[Service], name: str) -> Service:
    """The first one answers requests that name none."""
    for service in group:
        if service.knows(name) or service.knows(name.removesuffix(TAG)):
            return service
    raise errors.unknown_model(group[0].names)


class ModelSwitch:
    """An ASGI application: one route of all models."""

    def __init__(self, group: Sequence[Service], route: ApiRoute) -> None:
        self._group = group
        self._apps: dict[str, ASGIApp] = {service.slot.name: route.endpoint(service) for service in group}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = await self._group[0].body_reader.read(scope, receive)
        service = service_for(self._group, named_model(raw))
        async with AsyncExitStack() as held:
            waited = await _hold(service, scope, receive, held)
            app = self._apps[service.slot.name]
            await app(scope, _replayed(raw, receive), _telling(send, waited, service.slot.name) if waited else send)


async def _hold(service: Service, scope: Scope, receive: Receive, held: AsyncExitStack) -> float:
    """Waits for the model, and holds it until `held` ends. Returns the seconds for which it was waited."""
    assert service.models is not None
    if service.draining.is_set():
        raise errors.shutting_down().with_retry_after(1)
    if service.slot.is_open:
        return await held.enter_async_context(service.models.using(service.slot))
    try:
        async with interruptible(receive, service.settings.deadline_seconds):
            return await held.enter_async_context(service.models.using(service.slot))
    except Error as error:
        raise service.api_error(error, request_id=request_id(scope)) from None


def _replayed(raw: bytes, receive: Receive) -> Receive:
    """The body once more, and then what follows it."""
    is_read = False

    async def replay() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": raw, "more_body": False}

    return replay


def _telling(send: Send, seconds: float, name: str) -> Send:
    """Adds a header that says how long the request waited for its model."""
    text = f"{seconds:.3f}; {name}".encode("ascii", "replace")

    async def telling(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (WAITED, text)]
        await send(message)

    return telling
