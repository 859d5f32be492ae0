"""What /openapi.json says of every route: its bodies, its answers, examples that work."""

from __future__ import annotations

from typing import Any

from windlass.core.model import Frozen
from windlass.serve.api.routes import StateBody
from windlass.serve.api.status import Status
from windlass.wire.schema.chat import ChatChunk, ChatRequest, ChatResponse
from windlass.wire.schema.completions import CompletionRequest, CompletionResponse
from windlass.wire.schema.models import ModelCard, ModelList
from windlass.wire.schema.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse


class RouteShown(Frozen):
    path: str
    method: str
    name: str
    summary: str
    asked: type | None = None
    answered: type | None = None
    events: tuple[type, ...] = ()
    """Of its server-sent events."""
    examples: dict[str, dict[str, Any]] = {}
    parameters: tuple[dict[str, Any], ...] = ()
    is_open: bool = False
    """Needs no key."""
    is_text: bool = False
    is_any: bool = False
    is_state: bool = False
    """503 has the same body as 200."""


HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}

ROUTES: tuple[RouteShown, ...] = (
    RouteShown(
        path="/v1/chat/completions",
        method="post",
        name="chat",
        summary="Answer a chat.",
        asked=ChatRequest,
        answered=ChatResponse,
        events=(ChatChunk,),
        examples={
            "plain": HELLO,
            "streamed": {**HELLO, "stream": True, "stream_options": {"include_usage": True}},
            "tools": {**HELLO, "tools": [WEATHER], "tool_choice": "auto"},
            "json": {**HELLO, "response_format": {"type": "json_object"}},
        },
    ),
    RouteShown(
        path="/v1/completions",
        method="post",
        name="complete",
        summary="Continue a text.",
        asked=CompletionRequest,
        answered=CompletionResponse,
        events=(CompletionResponse,),
        examples={
            "plain": {"prompt": "Once upon a time", "max_tokens": 8},
            "scored": {"prompt": "Once upon a time", "max_tokens": 0, "echo": True, "logprobs": 1},
            "tokens": {"prompt": [1, 2, 3], "max_tokens": 4},
        },
    ),
    RouteShown(path="/v1/models", method="get", name="models", summary="What is served.", answered=ModelList),
    RouteShown(
        path="/v1/models/{model}",
        method="get",
        name="model",
        summary="One model.",
        answered=ModelCard,
        parameters=({"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}},),
    ),
    RouteShown(
        path="/tokenize",
        method="post",
        name="tokenize",
        summary="A text or a chat as token ids.",
        asked=TokenizeRequest,
        answered=TokenizeResponse,
        examples={"text": {"prompt": "Hello"}, "chat": {"messages": HELLO["messages"]}},
    ),
    RouteShown(
        path="/detokenize",
        method="post",
        name="detokenize",
        summary="Token ids as text.",
        asked=DetokenizeRequest,
        answered=DetokenizeResponse,
        examples={"plain": {"tokens": [1, 2, 3]}},
    ),
    RouteShown(
        path="/health",
        method="get",
        name="health",
        summary="Whether the engine lives.",
        answered=StateBody,
        is_open=True,
        is_state=True,
    ),
    RouteShown(
        path="/ready",
        method="get",
        name="ready",
        summary="Whether requests would be taken.",
        answered=StateBody,
        is_state=True,
    ),
    RouteShown(path="/metrics", method="get", name="metrics", summary="Numbers for Prometheus.", is_text=True),
    RouteShown(path="/openapi.json", method="get", name="openapi", summary="This document.", is_any=True),
    RouteShown(path="/windlass/status", method="get", name="status", summary="What the page shows.", answered=Status),
    RouteShown(path="/windlass/live", method="get", name="live", summary="The same, every second, as events.", events=(Status,)),
)
