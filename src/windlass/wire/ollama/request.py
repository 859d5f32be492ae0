"""A body of Ollama's API -> a chat, or a completion where no template is wanted."""

from __future__ import annotations

from typing import Any

import msgspec

from windlass.wire.decode import convert
from windlass.wire.ollama.schema import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaRequest,
    OllamaTool,
)
from windlass.wire.schema.chat import (
    ChatMessage,
    ChatRequest,
    JsonSchema,
    MessageFunction,
    MessageToolCall,
    ResponseFormat,
    TemplateVariables,
    Tool,
)
from windlass.wire.schema.completions import CompletionRequest
from windlass.wire.schema.errors import invalid, unsupported

HINTS = (
    "repeat_last_n num_keep num_batch num_gpu main_gpu num_thread numa low_vram use_mmap use_mlock vocab_only penalize_newline "
    "mirostat_eta mirostat_tau"
).split()
"""Options without effect here."""
NEUTRAL: dict[str, float] = {"mirostat": 0, "tfs_z": 1.0, "typical_p": 1.0}
PARAMS = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "chat_template_kwargs": "think",
    "reasoning_effort": "think",
    "temperature": "options.temperature",
    "top_p": "options.top_p",
    "top_k": "options.top_k",
    "min_p": "options.min_p",
    "seed": "options.seed",
    "stop": "options.stop",
    "presence_penalty": "options.presence_penalty",
    "frequency_penalty": "options.frequency_penalty",
}
"""Names of a chat's parameters here."""
TEXT_ONLY = "is not supported: messages are text only"


def ollama_to_chat(body: OllamaChatRequest, context_tokens: int) -> ChatRequest:
    _check(body, context_tokens)
    if not body.messages:
        raise invalid("messages", "is missing; the model is loaded already")
    messages = [_message(message, f"messages[{number}]") for number, message in enumerate(body.messages)]
    tools = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(body.tools or ())]
    return ChatRequest(messages=messages, tools=tools or None, **_thinking(body), **_common(body))


def generate_to_chat(body: OllamaGenerateRequest, context_tokens: int) -> ChatRequest:
    _check_generate(body, context_tokens)
    system = [ChatMessage(role="system", content=body.system)] if body.system else []
    return ChatRequest(messages=[*system, ChatMessage(role="user", content=body.prompt)], **_thinking(body), **_common(body))


def generate_to_completion(body: OllamaGenerateRequest, context_tokens: int) -> CompletionRequest:
    _check_generate(body, context_tokens)
    if body.system:
        raise invalid("system", "is only valid without raw")
    return CompletionRequest(prompt=body.prompt, **_common(body))


def unenforced(body: OllamaRequest) -> list[str]:
    """Accepted, but without effect."""
    options = body.options or OllamaOptions()
    names = [f"options.{name}" for name in HINTS if getattr(options, name) is not None]
    return [*names, *(["keep_alive"] if body.keep_alive is not None else [])]


def _check_generate(body: OllamaGenerateRequest, context_tokens: int) -> None:
    _check(body, context_tokens)
    for name, why in (
        ("suffix", "is not supported: no fill-in-the-middle"),
        ("template", "is not supported: the model's own template is used; or use raw"),
        ("context", "is not supported; use /api/chat"),
        ("images", TEXT_ONLY),
    ):
        if getattr(body, name):
            raise unsupported(name, why)


def _check(body: OllamaRequest, context_tokens: int) -> None:
    options = body.options or OllamaOptions()
    if options.num_ctx is not None and options.num_ctx > context_tokens:
        raise invalid("options.num_ctx", f"is {options.num_ctx}; this model is served with {context_tokens} tokens")
    for name, neutral in NEUTRAL.items():
        if getattr(options, name) not in (None, neutral):
            raise unsupported(f"options.{name}", "is not supported; use temperature, top_p, top_k or min_p")
    for name in ("logprobs", "top_logprobs"):
        if getattr(body, name):
            raise unsupported(name, "is not supported here; use /v1/chat/completions")
    if body.truncate or body.shift:
        raise unsupported("truncate" if body.truncate else "shift", "is not supported: prompts are never truncated")


def _common(body: OllamaRequest) -> dict[str, Any]:
    options = body.options or OllamaOptions()
    limit = options.num_predict
    return {
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "min_p": options.min_p,
        "seed": options.seed,
        "stop": options.stop,
        "max_tokens": None if limit is None or limit < 0 else limit,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "response_format": _format(body.format),
        "stream": body.stream is not False,
    }


def _format(format: str | dict[str, Any] | None) -> ResponseFormat | None:
    if not format:
        return None
    if isinstance(format, str):
        if format != "json":
            raise invalid("format", f"is {format[:40]!r}; it should be json or a JSON schema")
        return ResponseFormat(type="json_object")
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=format))


def _thinking(body: OllamaRequest) -> dict[str, Any]:
    if body.think is None:
        return {}
    if isinstance(body.think, str):
        return {"reasoning_effort": body.think}
    return {"chat_template_kwargs": TemplateVariables(enable_thinking=True)} if body.think else {"reasoning_effort": "none"}


def _message(message: OllamaMessage, where: str) -> ChatMessage:
    if message.images:
        raise unsupported(f"{where}.images", TEXT_ONLY)
    calls = [
        MessageToolCall(
            id=call.id,
            type="function",
            function=MessageFunction(name=call.function.name, arguments=msgspec.json.encode(call.function.arguments).decode()),
        )
        for call in message.tool_calls or ()
    ]
    return ChatMessage(
        role=message.role,
        content=message.content or "",
        reasoning_content=message.thinking or None,
        tool_calls=calls or None,
        name=message.tool_name,
        tool_call_id=message.tool_call_id if message.role == "tool" else None,
    )


def _tool(tool: OllamaTool, where: str) -> Tool:
    return convert({"type": "function", "function": tool.function}, Tool)
