"""`POST /v1/chat/completions`: requests, responses and stream chunks."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from windlass.wire.schema.errors import ErrorDetail
from windlass.wire.schema.sampling import CommonRequest
from windlass.wire.schema.structs import Count, Natural, RequestStruct, ResponseStruct
from windlass.wire.schema.usage import UsageBody

# --- requests --------------------------------------------------------------------------------------------------------


class ContentPart(RequestStruct):
    """A part of a message's content. Only text is supported; the others are declared so that they are rejected by name."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    video_url: Any = None
    cache_control: Any = None
    """Ignored here and below: common prefixes are cached automatically. Anthropic's name, which proxies pass on."""


class MessageFunction(RequestStruct):
    name: str
    arguments: str
    """JSON."""


class MessageToolCall(RequestStruct, kw_only=True):
    """A tool call of an earlier assistant message."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: MessageFunction
    index: int | None = None
    """Present in streamed calls, which some clients send back unchanged."""


class ChatMessage(RequestStruct):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Alias of the field above."""
    type: Literal["text", "message"] | None = None
    """Ignored; lm-evaluation-harness sends it."""
    cache_control: Any = None
    # Fields of responses, which clients send back.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None


class FunctionDefinition(RequestStruct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool | None = None


class Tool(RequestStruct):
    type: str
    function: FunctionDefinition | None = None
    custom: Any = None
    cache_control: Any = None


class ToolChoiceFunction(RequestStruct):
    name: str


class AllowedTool(RequestStruct):
    type: str = "function"
    function: ToolChoiceFunction | None = None
    name: str | None = None


class AllowedTools(RequestStruct):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class ToolChoice(RequestStruct):
    type: str
    function: ToolChoiceFunction | None = None
    custom: Any = None
    allowed_tools: AllowedTools | None = None
    """The model is shown only these."""


class JsonSchema(RequestStruct):
    schema: dict[str, Any] | bool | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """True: a schema that cannot be enforced completely is rejected. Otherwise the rest of it is enforced, and a header says so."""


class ResponseFormat(RequestStruct):
    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None
    """Beside json_object, as llama.cpp and others have it."""
    regex: str | None = None
    grammar: str | None = None


class TemplateVariables(RequestStruct):
    enable_thinking: bool | None = None
    thinking: bool | None = None
    """Alias of the field above."""


class ChatRequest(CommonRequest, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Natural | None = None
    """The current name of max_tokens."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=128)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """For templates that can only switch reasoning on or off, `none` and `minimal` mean off."""
    chat_template_kwargs: TemplateVariables | None = None
    parallel_tool_calls: bool | None = None
    """False: at most one call. Absent: one call if a call is required."""
    continue_final_message: bool | None = None
    """The answer continues the last message, which is the assistant's; without it, one with text is continued unless the output is
    constrained."""
    add_generation_prompt: bool | None = None
    """False only with continue_final_message."""

    # Accepted without effect, except that safety_identifier stands in for a missing user.
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Values that would have an effect are rejected (wire/server/unsupported.py).
    audio: Any = None
    modalities: list[str] | None = None
    store: bool | None = None
    prediction: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None
    moderation: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    verbosity: str | None = None
    echo: bool | None = None
    chat_template: str | None = None
    documents: Any = None
    best_of: Count | None = None
    suffix: str | None = None


# --- responses -------------------------------------------------------------------------------------------------------


class TopLogprob(ResponseStruct):
    token: str
    logprob: float
    bytes: list[int] | None = None
    token_id: int | UnsetType = UNSET


class ChatLogprob(ResponseStruct):
    token: str
    logprob: float
    bytes: list[int] | None = None
    """UTF-8 bytes; null if the token is part of a character and its bytes are unknown."""
    top_logprobs: list[TopLogprob] = []
    token_id: int | UnsetType = UNSET


class ChatLogprobs(ResponseStruct):
    content: list[ChatLogprob] | None = None
    refusal: list[ChatLogprob] | None = None


class ResponseFunction(ResponseStruct):
    name: str | UnsetType | None = None
    arguments: str | None = None


class ResponseToolCall(ResponseStruct):
    id: str | UnsetType | None = None
    type: str | UnsetType | None = "function"
    function: ResponseFunction = ResponseFunction()
    index: int | UnsetType = UNSET
    """In chunks: the index of the call this belongs to."""


class ResponseMessage(ResponseStruct):
    role: str | None = "assistant"
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    """Other servers' name for it; not written by Windlass."""
    tool_calls: list[ResponseToolCall] | UnsetType | None = UNSET


class ChatChoice(ResponseStruct, kw_only=True):
    index: int = 0
    message: ResponseMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType | None = UNSET


class ChatResponse(ResponseStruct, kw_only=True):
    id: str = ""
    object: str = "chat.completion"
    created: int | float = 0
    model: str = ""
    choices: list[ChatChoice]
    usage: UsageBody | None = None
    system_fingerprint: str | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class ChunkDelta(ResponseStruct):
    role: str | UnsetType | None = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    tool_calls: list[ResponseToolCall] | UnsetType | None = UNSET


class ChunkChoice(ResponseStruct):
    index: int = 0
    delta: ChunkDelta = ChunkDelta()
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType | None = UNSET


class ChatChunk(ResponseStruct):
    id: str = ""
    object: str = "chat.completion.chunk"
    created: int | float = 0
    model: str = ""
    choices: list[ChunkChoice] = []
    usage: UsageBody | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    error: ErrorDetail | str | UnsetType | None = UNSET
    """Set in the last chunk of a failed stream."""
