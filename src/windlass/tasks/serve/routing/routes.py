"""All routes of the API, in one table: the router and /openapi.json are both made from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from windlass.core.metrics.watched import Watched
from windlass.tasks.serve.api import endpoints, operator
from windlass.tasks.serve.api.adapters import chat_job, completion_job
from windlass.tasks.serve.api.generate import GenerateEndpoint
from windlass.tasks.serve.api.route import ApiRoute
from windlass.tasks.serve.api.status import Status
from windlass.tasks.serve.http.asgi import send_response
from windlass.tasks.serve.routing.adapter_routes import ADAPTER_ROUTES
from windlass.tasks.serve.routing.batch_routes import BATCH_ROUTES
from windlass.tasks.serve.routing.openapi import openapi
from windlass.tasks.serve.routing.other_routes import OTHER_ROUTES
from windlass.tasks.serve.service import Service
from windlass.wire.schema.chat import ChatChunk, ChatRequest, ChatResponse
from windlass.wire.schema.completions import CompletionRequest, CompletionResponse
from windlass.wire.schema.models import ModelCard, ModelList
from windlass.wire.schema.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse


async def openapi_json(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    await send_response(send, 200, _openapi_bytes(bool(service.keys)))


@cache
def _openapi_bytes(has_keys: bool) -> bytes:
    return msgspec.json.encode(openapi(ROUTES, has_keys))


def _endpoint(handler: endpoints.Handler) -> Callable[[Service], ASGIApp]:
    return partial(endpoints.Endpoint, handler=handler)


HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}

OPENAI_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        path="/v1/chat/completions",
        method="POST",
        operation_id="chat",
        summary="Create a chat completion.",
        endpoint=partial(GenerateEndpoint, make_job=chat_job),
        request=ChatRequest,
        response=ChatResponse,
        events=(ChatChunk,),
        examples={
            "plain": HELLO,
            "streamed": {**HELLO, "stream": True, "stream_options": {"include_usage": True}},
            "tools": {**HELLO, "tools": [WEATHER], "tool_choice": "auto"},
            "json": {**HELLO, "response_format": {"type": "json_object"}},
        },
    ),
    ApiRoute(
        path="/v1/completions",
        method="POST",
        operation_id="complete",
        summary="Create a text completion.",
        endpoint=partial(GenerateEndpoint, make_job=completion_job),
        request=CompletionRequest,
        response=CompletionResponse,
        events=(CompletionResponse,),
        examples={
            "plain": {"prompt": "Once upon a time", "max_tokens": 8},
            "scored": {"prompt": "Once upon a time", "max_tokens": 0, "echo": True, "logprobs": 1},
            "tokens": {"prompt": [1, 2, 3], "max_tokens": 4},
        },
    ),
    ApiRoute(
        path="/v1/models",
        method="GET",
        operation_id="models",
        summary="List the served models.",
        endpoint=_endpoint(endpoints.models),
        response=ModelList,
    ),
    ApiRoute(
        path="/v1/models/{model:path}",
        method="GET",
        operation_id="model",
        summary="Describe one model.",
        endpoint=_endpoint(endpoints.model),
        response=ModelCard,
        parameters=({"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}},),
    ),
    ApiRoute(
        path="/tokenize",
        method="POST",
        operation_id="tokenize",
        summary="Tokenize a prompt or a chat.",
        endpoint=_endpoint(endpoints.tokenize),
        request=TokenizeRequest,
        response=TokenizeResponse,
        examples={"text": {"prompt": "Hello"}, "chat": {"messages": HELLO["messages"]}},
    ),
    ApiRoute(
        path="/detokenize",
        method="POST",
        operation_id="detokenize",
        summary="Decode token ids to text.",
        endpoint=_endpoint(endpoints.detokenize),
        request=DetokenizeRequest,
        response=DetokenizeResponse,
        examples={"plain": {"tokens": [1, 2, 3]}},
    ),
    ApiRoute(
        path="/health",
        method="GET",
        operation_id="health",
        summary="Liveness: whether the engine is up.",
        endpoint=_endpoint(endpoints.health),
        response=endpoints.HealthBody,
        is_public=True,
        is_health=True,
    ),
    ApiRoute(
        path="/ready",
        method="GET",
        operation_id="ready",
        summary="Readiness: whether requests are accepted.",
        endpoint=_endpoint(endpoints.ready),
        response=endpoints.HealthBody,
        is_health=True,
    ),
    ApiRoute(
        path="/metrics",
        method="GET",
        operation_id="metrics",
        is_admin=True,
        summary="Prometheus metrics.",
        endpoint=_endpoint(endpoints.metrics),
        is_text=True,
    ),
    ApiRoute(
        path="/openapi.json",
        method="GET",
        operation_id="openapi",
        summary="This OpenAPI document.",
        endpoint=_endpoint(openapi_json),
        is_any=True,
    ),
    ApiRoute(
        path="/windlass/status",
        method="GET",
        operation_id="status",
        is_admin=True,
        summary="Server status, as shown on the web page.",
        endpoint=_endpoint(endpoints.get_status),
        response=Status,
    ),
    ApiRoute(
        path="/windlass/live",
        method="GET",
        operation_id="live",
        is_admin=True,
        summary="Server status once a second, as server-sent events.",
        endpoint=_endpoint(endpoints.live),
        events=(Status,),
    ),
)

OPERATOR_ROUTES: tuple[ApiRoute, ...] = (
    ApiRoute(
        path="/windlass/requests",
        method="GET",
        operation_id="requests",
        is_admin=True,
        summary="Requests in flight: age, tokens, speed.",
        endpoint=_endpoint(operator.requests),
        response=operator.RequestRows,
    ),
    ApiRoute(
        path="/windlass/requests/{number}",
        method="DELETE",
        operation_id="cancel_request",
        is_admin=True,
        summary="Cancel a request in flight.",
        endpoint=_endpoint(operator.cancel),
        response=operator.Cancelled,
        parameters=({"name": "number", "in": "path", "required": True, "schema": {"type": "integer", "minimum": 1}},),
    ),
    ApiRoute(
        path="/windlass/history",
        method="GET",
        operation_id="history",
        is_admin=True,
        summary="Alerts, and charts of the last day.",
        endpoint=_endpoint(operator.history),
        response=Watched,
    ),
)

ROUTES: tuple[ApiRoute, ...] = (*OPENAI_ROUTES, *OPERATOR_ROUTES, *OTHER_ROUTES, *BATCH_ROUTES, *ADAPTER_ROUTES)
