"""`GET /openapi.json`, made of the structs that bodies are decoded into, so that it cannot say anything else."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from windlass import __version__
from windlass.serve.api.route_docs import ROUTES, RouteShown
from windlass.serve.http.messages import send_bytes
from windlass.serve.service import Service
from windlass.wire.schema.errors import ErrorBody

MEANING = {
    200: "As asked.",
    400: "Refused: `param` names what is to blame.",
    401: "No API key, or a wrong one.",
    403: "From another site's page, or addressed by another's name.",
    404: "No such model, route or tokenizer.",
    405: "Another method.",
    408: "The deadline passed, or the body did not come in time.",
    413: "The body is too large.",
    429: "The queue is full, or there is too much of this to do; Retry-After says when to come again.",
    500: "The answer could not be computed, though nothing was wrong with what was asked.",
    503: "The engine is being loaded or started anew, the server is ending, or too much is being read; Retry-After says when to come again.",
}
WITH_BODY = (400, 401, 403, 404, 405, 408, 413, 429, 500, 503)
WITHOUT_BODY = (401, 403, 404, 405, 503)
RETRY = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}}


async def document(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    await send_bytes(send, 200, _bytes(bool(service.settings.api_keys)))


@cache
def _bytes(has_keys: bool) -> bytes:
    return msgspec.json.encode(openapi(has_keys))


def openapi(has_keys: bool) -> dict[str, Any]:
    kinds = [kind for route in ROUTES for kind in (route.asked, route.answered, *route.events) if kind is not None]
    _, components = msgspec.json.schema_components([*kinds, ErrorBody], ref_template="#/components/schemas/{name}")
    found: dict[str, Any] = {
        "openapi": "3.2.0",
        "info": {"title": "Windlass", "version": __version__, "description": "OpenAI's API over a model on your own hardware."},
        "paths": {},
        "components": {"schemas": components},
    }
    if has_keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    for route in ROUTES:
        found["paths"].setdefault(route.path, {})[route.method] = _operation(route)
    return found


def _operation(route: RouteShown) -> dict[str, Any]:
    found: dict[str, Any] = {"summary": route.summary, "operationId": route.name, "responses": _responses(route)}
    if route.parameters:
        found["parameters"] = list(route.parameters)
    if route.asked is not None:
        media: dict[str, Any] = {"schema": _reference(route.asked)}
        if route.examples:
            media["examples"] = {name: {"value": value} for name, value in route.examples.items()}
        found["requestBody"] = {"required": True, "content": {"application/json": media}}
    if route.is_open:
        found["security"] = []
    return found


def _responses(route: RouteShown) -> dict[str, Any]:
    errors = WITH_BODY if route.asked is not None else WITHOUT_BODY
    found = {"200": {"description": MEANING[200], "content": _content(route)}}
    for status in errors:
        found[str(status)] = _error(status, route)
    return found


def _content(route: RouteShown) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.answered is not None:
        content["application/json"] = {"schema": _reference(route.answered)}
    if route.events:
        content["text/event-stream"] = {"itemSchema": _event(route)}
    if route.is_text:
        content["text/plain"] = {"schema": {"type": "string"}}
    if route.is_any:
        content["application/json"] = {"schema": {"type": "object"}}
    return content


def _event(route: RouteShown) -> dict[str, Any]:
    """An event's data is JSON in a text; a stream of answers ends with `[DONE]`, or with an error in place of it."""
    kinds = [_reference(kind) for kind in (*route.events, ErrorBody)]
    json_text = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}
    done = [{"type": "string", "const": "[DONE]"}] if route.asked is not None else []
    return {"type": "object", "properties": {"data": {"anyOf": [json_text, *done]}}, "required": ["data"]}


def _error(status: int, route: RouteShown) -> dict[str, Any]:
    body = route.answered if route.is_state and status == 503 else ErrorBody
    found: dict[str, Any] = {
        "description": MEANING[status],
        "content": {"application/json": {"schema": _reference(body)}},
    }
    if status in (429, 503):
        found["headers"] = RETRY
    return found


def _reference(kind: Any) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
