"""Routes of the other APIs: OpenAI's Responses, Anthropic's Messages, Ollama's."""

from __future__ import annotations

from functools import partial
from typing import Any

from windlass.tasks.serve.api import embeddings as numbers
from windlass.tasks.serve.api import other_endpoints as other
from windlass.tasks.serve.api.endpoints import Endpoint, Handler
from windlass.tasks.serve.api.generate import GenerateEndpoint
from windlass.tasks.serve.api.route import ApiRoute
from windlass.tasks.serve.api.translations import messages_job, ollama_chat_job, ollama_generate_job, responses_job
from windlass.wire.anthropic.schema import AnthropicErrorBody, CountTokensRequest, CountTokensResponse, MessagesRequest
from windlass.wire.anthropic.writer import anthropic_error
from windlass.wire.ollama.schema import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaErrorBody,
    OllamaGenerateRequest,
    OllamaModelRequest,
)
from windlass.wire.ollama.writer import NDJSON, ollama_error
from windlass.wire.responses.schema import ResponsesRequest
from windlass.wire.schema.chat import ChatRequest
from windlass.wire.schema.embeddings import EmbeddingRequest, EmbeddingResponse, RerankRequest, RerankResponse, TeiRank
from windlass.wire.schema.tokens import InputTokens

EVENTS = ("text/event-stream",)
LINES = (NDJSON.decode(),)
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Say hello."}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
ID = ({"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}},)


def ask(path: str, name: str, summary: str, handler: Handler, **rest: Any) -> ApiRoute:
    rest = {"method": "GET", "is_any": "response" not in rest, **rest}
    return ApiRoute(path=path, operation_id=name, summary=summary, endpoint=partial(Endpoint, handler=handler), **rest)


RESPONSES = (
    ApiRoute(
        path="/v1/responses",
        method="POST",
        operation_id="create_response",
        summary="Create a response (OpenAI's Responses API).",
        endpoint=partial(GenerateEndpoint, make_job=responses_job),
        request=ResponsesRequest,
        is_any=True,
        streams=EVENTS,
        examples={
            "plain": {"input": "Say hello.", "max_output_tokens": 8},
            "items": {"input": HELLO, "instructions": "Be brief.", "store": False, "max_output_tokens": 8},
            "tools": {"input": HELLO, "tools": [{"type": "function", "name": "weather", "parameters": SCHEMA}]},
        },
    ),
    ask(
        "/v1/responses/input_tokens", "count_response", "Count the tokens of a response's input.", other.count_response, method="POST",
        request=ResponsesRequest, response=InputTokens, examples={"plain": {"input": "Say hello."}},
    ),
    ask(
        "/v1/chat/completions/input_tokens", "count_chat", "Count the tokens of a chat's prompt.", other.count_chat, method="POST",
        request=ChatRequest, response=InputTokens, examples={"plain": {"messages": HELLO}},
    ),
    ask("/v1/responses/{id}", "get_response", "A stored response.", other.get_response, parameters=ID),
    ask(
        "/v1/responses/{id}",
        "delete_response",
        "Delete a stored response.",
        other.delete_response,
        parameters=ID,
        method="DELETE",
    ),
    ask("/v1/responses/{id}/input_items", "input_items", "The input of a stored response.", other.input_items, parameters=ID),
)  # fmt: skip
ANTHROPIC: dict[str, Any] = {"error": AnthropicErrorBody, "error_body": anthropic_error}
MESSAGES = (
    ApiRoute(
        path="/v1/messages",
        method="POST",
        operation_id="create_message",
        summary="Create a message (Anthropic's Messages API).",
        endpoint=partial(GenerateEndpoint, make_job=messages_job),
        request=MessagesRequest,
        is_any=True,
        streams=EVENTS,
        examples={
            "plain": {"messages": HELLO, "max_tokens": 8},
            "tools": {"messages": HELLO, "max_tokens": 8, "tools": [{"name": "weather", "input_schema": SCHEMA}]},
        },
        **ANTHROPIC,
    ),
    ask(
        "/v1/messages/count_tokens", "count_tokens", "Count the tokens of a message's prompt.", other.count_tokens, method="POST",
        request=CountTokensRequest, response=CountTokensResponse, examples={"plain": {"messages": HELLO}}, **ANTHROPIC,
    ),
)  # fmt: skip
ERRORS: dict[str, Any] = {"error": OllamaErrorBody, "error_body": ollama_error}
OLLAMA = (
    ApiRoute(
        path="/api/chat",
        method="POST",
        operation_id="ollama_chat",
        summary="A chat (Ollama's API).",
        endpoint=partial(GenerateEndpoint, make_job=ollama_chat_job),
        request=OllamaChatRequest,
        is_any=True,
        streams=LINES,
        examples={"plain": {"model": "", "messages": HELLO, "options": {"num_predict": 8}}},
        **ERRORS,
    ),
    ApiRoute(
        path="/api/generate",
        method="POST",
        operation_id="ollama_generate",
        summary="An answer to a prompt (Ollama's API).",
        endpoint=partial(GenerateEndpoint, make_job=ollama_generate_job),
        request=OllamaGenerateRequest,
        is_any=True,
        streams=LINES,
        examples={
            "plain": {"model": "", "prompt": "Say hello.", "options": {"num_predict": 8}},
            "raw": {"model": "", "prompt": "Once upon", "raw": True, "options": {"num_predict": 8}},
        },
        **ERRORS,
    ),
    ask("/api/tags", "ollama_tags", "The served models (Ollama's API).", other.ollama_tags, **ERRORS),
    ask("/api/ps", "ollama_ps", "The loaded models (Ollama's API).", other.ollama_ps, **ERRORS),
    ask("/api/version", "ollama_version", "The server's version (Ollama's API).", other.ollama_version, **ERRORS),
    ask(
        "/api/show", "ollama_show", "Describe a model (Ollama's API).", other.ollama_show, method="POST", request=OllamaModelRequest,
        **ERRORS,
    ),
    ask(
        "/api/pull", "ollama_pull", "Does nothing for the served model (Ollama's API).", other.ollama_pull, method="POST",
        request=OllamaModelRequest, streams=LINES, **ERRORS,
    ),
)  # fmt: skip
NUMBERS = (
    ask(
        "/v1/embeddings", "embeddings", "Embed texts.", numbers.embeddings, method="POST", request=EmbeddingRequest,
        response=EmbeddingResponse, examples={"plain": {"input": "Hello"}, "several": {"input": ["a", "b"], "encoding_format": "base64"}},
    ),
    ask(
        "/v1/rerank", "rerank", "Rank documents by how well they explain a query.", numbers.rerank, method="POST",
        request=RerankRequest, response=RerankResponse, response_items=TeiRank,
        examples={"plain": {"query": "a", "documents": ["b", {"text": "c"}]}, "tei": {"query": "a", "texts": ["b", "c"]}},
    ),
    ask("/tokenizer_info", "tokenizer_info", "Special tokens and the chat template.", other.tokenizer_info),
    ask(
        "/api/embed", "ollama_embed", "Embed texts (Ollama's API).", other.ollama_embed, method="POST", request=OllamaEmbedRequest,
        **ERRORS,
    ),
)  # fmt: skip
OTHER_ROUTES: tuple[ApiRoute, ...] = (*RESPONSES, *MESSAGES, *OLLAMA, *NUMBERS)
