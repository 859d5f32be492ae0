"""Endpoints of the other APIs that generate nothing: stored responses, counting tokens, Ollama's lists of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from windlass import __version__
from windlass.tasks.serve.api.caller import caller_of
from windlass.tasks.serve.api.embeddings import embed_all, inputs_of, unit_vector
from windlass.tasks.serve.api.endpoints import admitted_tokens, ready_body, send_json, tokenizer_of
from windlass.tasks.serve.api.interrupt import interruptible
from windlass.tasks.serve.api.translations import chat_of_count, check_ollama_model, responses_chat
from windlass.tasks.serve.backend.stored_responses import StoredResponse
from windlass.tasks.serve.http import errors
from windlass.tasks.serve.http.asgi import send_response
from windlass.tasks.serve.service import Service
from windlass.wire.anthropic.schema import CountTokensRequest, CountTokensResponse
from windlass.wire.decode import decode
from windlass.wire.messages import from_messages, from_tools
from windlass.wire.ollama.schema import OllamaEmbedRequest, OllamaModelRequest
from windlass.wire.ollama.writer import NDJSON, now
from windlass.wire.responses.schema import ResponsesRequest
from windlass.wire.schema.chat import ChatRequest
from windlass.wire.schema.errors import ApiError, invalid, unsupported
from windlass.wire.schema.tokens import InputTokens
from windlass.wire.server.requests import check_fits, naming_params

NEVER = "9999-12-31T23:59:59Z"

# --- stored responses ------------------------------------------------------------------------------------------------


async def get_response(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    await send_response(send, 200, _stored(service, scope).response)


async def delete_response(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    id = scope["path_params"]["id"]
    if not service.responses.delete(caller_of(scope).share, id):
        raise errors.unknown_response()
    await send_json(send, {"id": id, "object": "response", "deleted": True})


async def input_items(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    items = [_with_id(item, place) for place, item in enumerate(msgspec.json.decode(_stored(service, scope).items))]
    items.reverse()  # newest first, as OpenAI's default
    ids = [item["id"] for item in items] or [None]
    await send_json(send, {"object": "list", "data": items, "first_id": ids[0], "last_id": ids[-1], "has_more": False})


def _stored(service: Service, scope: Scope) -> StoredResponse:
    found = service.responses.get(caller_of(scope).share, scope["path_params"]["id"])
    if found is None:
        raise errors.unknown_response()
    return found


def _with_id(item: dict[str, Any], place: int) -> dict[str, Any]:
    content = item.get("content")
    parts = [{"type": "input_text", "text": content}] if isinstance(content, str) else content
    shown = {"content": parts} if content is not None else {}
    return {"id": f"item_{place}", "type": "message", "status": "completed", **item, **shown}


# --- Anthropic's -----------------------------------------------------------------------------------------------------


async def count_tokens(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    def chat(raw: bytes) -> ChatRequest:
        return chat_of_count(decode(raw, CountTokensRequest))

    await send_json(send, CountTokensResponse(input_tokens=await _count(service, scope, receive, chat)))


# --- OpenAI's --------------------------------------------------------------------------------------------------------


async def count_response(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """Of a response that would be created."""

    def chat(raw: bytes) -> ChatRequest:
        return responses_chat(service, decode(raw, ResponsesRequest), caller_of(scope))

    count = await _count(service, scope, receive, chat)
    await send_json(send, InputTokens(object="response.input_tokens", input_tokens=count))


async def count_chat(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    count = await _count(service, scope, receive, lambda raw: decode(raw, ChatRequest))
    await send_json(send, InputTokens(object="chat.completion.input_tokens", input_tokens=count))


async def _count(service: Service, scope: Scope, receive: Receive, chat: Callable[[bytes], ChatRequest]) -> int:
    """Tokens of a prompt."""
    raw = await ready_body(service, scope, receive)
    client = tokenizer_of(service)
    caller = caller_of(scope)
    with admitted_tokens(service, caller.share):
        async with interruptible(receive, service.settings.deadline_seconds):
            messages, tools = await service.body_reader.parsed(raw, lambda raw: _prompt(service, chat(raw)))
            owner = caller.owner()
            return len(await (client.tokenize(messages, tools, owner=owner) if tools else client.tokenize(messages, owner=owner)))


def _prompt(service: Service, chat: ChatRequest) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    service.check_model(chat.model)
    check_fits("messages", len(chat.messages), service.limits)
    with naming_params(chat):
        return list(from_messages(chat.messages)), list(from_tools(chat.tools or ()))


# --- Ollama's --------------------------------------------------------------------------------------------------------


async def ollama_version(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, {"version": __version__})


async def ollama_tags(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, {"models": [_model(one) for one in service.group]})


async def ollama_ps(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    await send_json(send, {"models": [_loaded(one) for one in service.group if one.models is None or one.slot.is_open]})


def _loaded(service: Service) -> dict[str, Any]:
    info = service.info
    vram = 0 if info.device in ("", "cpu") else info.weights_bytes
    return {**_model(service), "expires_at": NEVER, "size_vram": vram, "context_length": info.context_tokens}


async def ollama_show(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    _named(service, decode(await ready_body(service, scope, receive), OllamaModelRequest))
    info = service.info
    capabilities = ["completion", *(["tools"] if info.tools else [])]
    shown = {
        "details": _details(info.scheme),
        "model_info": {"general.architecture": "windlass", "windlass.context_length": info.context_tokens},
        "capabilities": capabilities,
        "modified_at": now(),
        "license": "",
        "modelfile": "",
        "parameters": "",
        "template": "",
    }
    await send_json(send, shown)


async def ollama_pull(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    """The served model is there already; others cannot be pulled."""
    body = decode(await ready_body(service, scope, receive), OllamaModelRequest)
    _named(service, body)
    data = msgspec.json.encode({"status": "success"})
    await (send_response(send, 200, data + b"\n", NDJSON) if body.stream is not False else send_response(send, 200, data))


def _named(service: Service, body: OllamaModelRequest) -> None:
    name = body.model or body.name
    if not name:
        raise invalid("model", "is missing")
    check_ollama_model(service, name)


def _model(service: Service) -> dict[str, Any]:
    """Of one that is not loaded only what is known then."""
    name, is_known = service.model, service.models is None or service.supervisor.info is not None
    return {
        "name": name,
        "model": name,
        "modified_at": now(),
        "size": service.info.weights_bytes if is_known else 0,
        "digest": service.fingerprint.removeprefix("fp_") if is_known else "",
        "details": _details(service.info.scheme if is_known else ""),
    }


def _details(scheme: str) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "windlass",
        "family": "",
        "families": None,
        "parameter_size": "",
        "quantization_level": scheme,
    }


async def ollama_embed(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    body = decode(await ready_body(service, scope, receive), OllamaEmbedRequest)
    check_ollama_model(service, body.model)
    if body.truncate:
        raise unsupported("truncate", "is not supported: inputs are never truncated")
    given = [body.input] if isinstance(body.input, str) else body.input
    found = await embed_all(service, inputs_of(given), "last", scope, receive, body)
    vectors = [unit_vector(one.vector, body.dimensions) for one in found]
    count = sum(one.num_tokens for one in found)
    await send_json(send, {"model": body.model, "embeddings": vectors, "prompt_eval_count": count})


# --- lm-evaluation-harness -------------------------------------------------------------------------------------------


async def tokenizer_info(service: Service, scope: Scope, receive: Receive, send: Send) -> None:
    client: Any = tokenizer_of(service)
    describe = getattr(client, "tokenizer_info", None)
    if describe is None:
        raise ApiError("the tokenizer of this model is not available", code="no_tokenizer", status=404)
    await send_json(send, {**describe(), "model_max_length": service.info.context_tokens})
