"""`POST /v1/responses`: the request. Responses are written as plain values (writer.py)."""

from __future__ import annotations

from typing import Any, Literal

from windlass.wire.schema.structs import Natural, Positive, RequestStruct, Share, Temperature


class InputPart(RequestStruct):
    type: str
    text: str | None = None
    refusal: str | None = None
    # Fields of outputs, which clients send back.
    annotations: Any = None
    logprobs: Any = None
    # Declared so that they are rejected by name.
    image_url: Any = None
    file_id: Any = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None
    detail: Any = None
    input_audio: Any = None
    prompt_cache_breakpoint: Any = None


class InputItem(RequestStruct):
    """A message, a function call, its output, or reasoning; by `type`."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None


class ResponseTool(RequestStruct):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    output_schema: Any = None
    allowed_callers: Any = None


class ResponseToolChoice(RequestStruct):
    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]] | None = None


class TextFormat(RequestStruct):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(RequestStruct):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(RequestStruct):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponsesStreamOptions(RequestStruct):
    include_obfuscation: bool | None = None


class ResponsesRequest(RequestStruct):
    model: str = ""
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    max_output_tokens: Natural | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    store: bool | None = None
    """Stored unless false, for a day, within limits."""
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    timeout: Positive | None = None
    """Windlass only: the request's deadline in seconds."""
    seed: int | None = None
    """An extension, as in other servers."""
    # Values that would have an effect are rejected.
    background: bool | None = None
    conversation: Any = None
    context_management: Any = None
    include: list[str] | None = None
    max_tool_calls: Any = None
    moderation: Any = None
    prompt: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    top_logprobs: Natural | None = None
    truncation: str | None = None
