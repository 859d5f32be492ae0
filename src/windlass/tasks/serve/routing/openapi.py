"""The OpenAPI document, generated from the route table and from the structs that bodies are decoded into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from windlass import __version__
from windlass.tasks.serve.api.route import ApiRoute
from windlass.wire.schema.errors import ErrorBody

DESCRIPTIONS = {
    200: "Success.",
    400: "Invalid request; `param` names the parameter at fault.",
    401: "API key missing or wrong.",
    403: "Host or Origin header not allowed.",
    404: "Unknown route or model, or the model has no tokenizer here.",
    405: "Method not allowed.",
    408: "Deadline exceeded, or the request body arrived too slowly.",
    413: "Request body too large.",
    429: "Queue full or engine overloaded; retry after Retry-After seconds.",
    500: "Generation failed although the request was valid.",
    503: "Engine loading or restarting, server shutting down, or too many request bodies in flight; retry after Retry-After seconds.",
}
WITH_BODY = (400, 401, 403, 404, 405, 408, 413, 429, 500, 503)
WITHOUT_BODY = (401, 403, 404, 405, 503)
FORM = {
    "type": "object",
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"type": "string", "const": "batch"}},
    "required": ["file", "purpose"],
}
RETRY = {"Retry-After": {"description": "Seconds to wait before retrying.", "schema": {"type": "integer", "minimum": 1}}}


def openapi(routes: Sequence[ApiRoute], has_keys: bool) -> dict[str, Any]:
    used = [kind for route in routes for kind in (route.request, route.response, route.response_items, *route.events)]
    kinds = [kind for kind in used if kind is not None]
    kinds += [route.error for route in routes]
    _, components = msgspec.json.schema_components([*kinds, ErrorBody], ref_template="#/components/schemas/{name}")
    found: dict[str, Any] = {
        "openapi": "3.2.0",
        "info": {
            "title": "Windlass",
            "version": __version__,
            "description": "OpenAI-compatible API for a model on your own hardware.",
        },
        "paths": {},
        "components": {"schemas": components},
    }
    if has_keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    for route in routes:
        found["paths"].setdefault(route.openapi_path, {})[route.method.lower()] = _operation(route)
    return found


def _operation(route: ApiRoute) -> dict[str, Any]:
    found: dict[str, Any] = {"summary": route.summary, "operationId": route.operation_id, "responses": _responses(route)}
    if route.parameters:
        found["parameters"] = list(route.parameters)
    if route.request is not None:
        media: dict[str, Any] = {"schema": _reference(route.request)}
        if route.examples:
            media["examples"] = {name: {"value": value} for name, value in route.examples.items()}
        found["requestBody"] = {"required": True, "content": {"application/json": media}}
    if route.is_form:
        found["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": FORM}}}
    if route.is_public:
        found["security"] = []
    return found


def _responses(route: ApiRoute) -> dict[str, Any]:
    errors = WITH_BODY if route.request is not None or route.is_form else WITHOUT_BODY
    found = {"200": {"description": DESCRIPTIONS[200], "content": _content(route)}}
    for status in errors:
        found[str(status)] = _error(status, route)
    return found


def _content(route: ApiRoute) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.response is not None:
        content["application/json"] = {"schema": _response(route)}
    if route.events:
        content["text/event-stream"] = {"itemSchema": _event(route)}
    for media_type in route.streams:
        is_events = media_type == "text/event-stream"
        content[media_type] = {"itemSchema": {"type": "object"}} if is_events else {"schema": {"type": "string"}}
    if route.is_text:
        content["text/plain"] = {"schema": {"type": "string"}}
    if route.is_bytes:
        content["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
    if route.is_any:
        content["application/json"] = {"schema": {"type": "object"}}
    return content


def _response(route: ApiRoute) -> dict[str, Any]:
    whole = _reference(route.response)
    if route.response_items is None:
        return whole
    return {"anyOf": [whole, {"type": "array", "items": _reference(route.response_items)}]}


def _event(route: ApiRoute) -> dict[str, Any]:
    """An event's data is JSON text; a completion stream ends with `[DONE]`, or with an error in its place."""
    kinds = [_reference(kind) for kind in (*route.events, ErrorBody)]
    json_text = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}
    done = [{"type": "string", "const": "[DONE]"}] if route.request is not None else []
    return {"type": "object", "properties": {"data": {"anyOf": [json_text, *done]}}, "required": ["data"]}


def _error(status: int, route: ApiRoute) -> dict[str, Any]:
    body = route.response if route.is_health and status == 503 else route.error
    found: dict[str, Any] = {
        "description": DESCRIPTIONS[status],
        "content": {"application/json": {"schema": _reference(body)}},
    }
    if status in (429, 503):
        found["headers"] = RETRY
    return found


def _reference(kind: Any) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
