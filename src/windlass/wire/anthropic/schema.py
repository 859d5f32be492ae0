"""`POST /v1/messages` and `/v1/messages/count_tokens`: requests, and the format of errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from windlass.wire.schema.structs import Count, Fraction, Natural, Positive, RequestStruct, ResponseStruct


class Block(RequestStruct):
    """A content block, by `type`."""

    type: str
    text: str | None = None
    cache_control: Any = None
    """Ignored: common prefixes are cached automatically."""
    citations: Any = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    caller: Any = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    source: Any = None
    title: Any = None
    context: Any = None


class AnthropicMessage(RequestStruct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(RequestStruct):
    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    cache_control: Any = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: Any = None
    input_examples: Any = None


class AnthropicToolChoice(RequestStruct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestStruct):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Natural | None = None
    """Not enforced; a header says so."""
    display: str | None = None


class OutputFormat(RequestStruct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(RequestStruct):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class AnthropicMetadata(RequestStruct):
    user_id: str | None = None


class CountTokensRequest(RequestStruct, kw_only=True):
    model: str = ""
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1)]
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None
    context_management: Any = None
    mcp_servers: Any = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Count
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: Fraction | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Natural | None = None
    metadata: AnthropicMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    timeout: Positive | None = None
    """Windlass only: the request's deadline in seconds."""
    container: Any = None
    inference_geo: Any = None
    speed: str | None = None


class CountTokensResponse(ResponseStruct):
    input_tokens: int


class AnthropicErrorDetail(ResponseStruct):
    type: str
    message: str


class AnthropicErrorBody(ResponseStruct):
    error: AnthropicErrorDetail
    type: str = "error"
