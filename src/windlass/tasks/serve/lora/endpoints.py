"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as vLLM has them. For an admin's key only: also if the server has no keys."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any, TypeVar

from msgspec import Meta
from starlette.types import Receive, Scope, Send

from windlass.core.model import Frozen
from windlass.tasks.serve.api.endpoints import send_json
from windlass.tasks.serve.http import errors
from windlass.tasks.serve.lora.runtime import RuntimeAdapters
from windlass.tasks.serve.service import Service
from windlass.wire.decode import decode
from windlass.wire.schema.errors import ApiError
from windlass.wire.schema.structs import RequestStruct

Result = TypeVar("Result")
Name = Annotated[str, Meta(min_length=1, max_length=64)]


class LoadAdapterRequest(RequestStruct, kw_only=True):
    lora_name: Name
    lora_path: Annotated[str, Meta(min_length=1, max_length=1024)]
    base_model: str | None = None
    """Of several models, which one; by default the first."""


class UnloadAdapterRequest(RequestStruct, kw_only=True):
    lora_name: Name
    base_model: str | None = None


class AdapterChanged(Frozen):
    id: str
    """What requests call it."""
    message: str
    restarted: bool
    """Whether the engine was started anew for it."""


async def load(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    body = decode(await _admin_body(service, scope, receive), LoadAdapterRequest)
    one = _model(service, body.base_model)
    why = await _to_the_end(_adapters(one).load(body.lora_name, body.lora_path))
    how = f"loaded; the engine was started for it: {why}" if why else "loaded into the engine that runs"
    await _changed(send, one, body.lora_name, how, bool(why))


async def unload(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    body = decode(await _admin_body(service, scope, receive), UnloadAdapterRequest)
    one = _model(service, body.base_model)
    runs = await _to_the_end(_adapters(one).unload(body.lora_name))
    freed = "when its last request ends" if runs else "when the engine is next started"
    await _changed(send, one, body.lora_name, f"unloaded; its memory is given back {freed}", restarted=False)


async def _changed(send: Send, service: Service, name: str, what: str, restarted: bool) -> None:
    service.log.line(f"adapter {service.shown_model(name)} {what}")
    changed = AdapterChanged(id=service.shown_model(name), message=f"adapter {name} {what}", restarted=restarted)
    await send_json(send, changed)


async def _admin_body(service: Service, scope: Scope, receive: Receive) -> bytes:
    """Who has an admin's key was checked for every route; but without keys everybody would be let in."""
    if not service.keys:
        raise ApiError(
            "adapters are loaded and unloaded with an admin's API key, and this server has no keys; see --api-key",
            code="forbidden",
            status=403,
            type="permission_error",
        )
    return await service.body_reader.read(scope, receive)


def _model(service: Service, name: str | None) -> Service:
    found = next((one for one in service.group if one.model == name), None) if name else service
    if found is None:
        raise errors.unknown_model([one.model for one in service.group])
    return found


def _adapters(service: Service) -> RuntimeAdapters:
    found: Any = service.runtime_adapters
    if found is None:
        raise ApiError("this server takes no adapters while it runs; start it with --lora-dir DIR", code="not_found", status=404)
    return found


async def _to_the_end(change: Coroutine[Any, Any, Result]) -> Result:
    """Also when the client goes away: half a change would be a model that nobody can use."""
    return await asyncio.shield(asyncio.create_task(change))
