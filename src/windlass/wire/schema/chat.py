"""`POST /v1/chat/completions`: what is asked, what is answered, what is streamed."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from windlass.wire.schema.errors import ErrorDetail
from windlass.wire.schema.sampling import CommonRequest
from windlass.wire.schema.structs import Answered, Asked, Count, Natural
from windlass.wire.schema.usage import UsageBody

# --- asked -----------------------------------------------------------------------------------------------------------


class Part(Asked):
    """Of a message's content. Only text is taken; the others are declared so that they are refused by name."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    video_url: Any = None


class CalledFunction(Asked):
    name: str
    arguments: str
    """JSON."""


class Called(Asked, kw_only=True):
    """A call that the model made earlier."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction
    index: int | None = None
    """Of streamed calls, which some programs send back as they came."""


class Message(Asked):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[Called] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same by its other name."""
    type: Literal["text", "message"] | None = None
    """Says nothing; lm-evaluation-harness sends it."""
    # What answers have, and so what programs send back.
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None


class Function(Asked):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool | None = None


class Tool(Asked):
    type: str
    function: Function | None = None
    custom: Any = None


class NamedFunction(Asked):
    name: str


class NamedTool(Asked):
    type: str
    function: NamedFunction | None = None
    custom: Any = None
    allowed_tools: Any = None


class JsonSchema(Asked):
    schema: dict[str, Any] | bool | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """Answers always follow the schema."""


class ResponseFormat(Asked):
    type: Literal["text", "json_object", "json_schema", "regex", "grammar"]
    json_schema: JsonSchema | None = None
    regex: str | None = None
    grammar: str | None = None


class TemplateVariables(Asked):
    enable_thinking: bool | None = None
    thinking: bool | None = None
    """The same by its other name."""


class ChatRequest(CommonRequest, kw_only=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Natural | None = None
    """The newer name of max_tokens."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=128)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    """`none` and `minimal` switch reasoning off, the others on: templates have a switch and no degrees."""
    chat_template_kwargs: TemplateVariables | None = None

    # Taken, because they ask for nothing: who is asking, and hints for a cache.
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # Refused where they ask for what is not done here (wire/server/unsupported.py).
    audio: Any = None
    modalities: list[str] | None = None
    store: bool | None = None
    prediction: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None
    moderation: Any = None
    parallel_tool_calls: bool | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    verbosity: str | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    documents: Any = None
    best_of: Count | None = None
    suffix: str | None = None


# --- answered --------------------------------------------------------------------------------------------------------


class TopLogprob(Answered):
    token: str
    logprob: float
    bytes: list[int] | None = None
    token_id: int | UnsetType = UNSET


class ChatLogprob(Answered):
    token: str
    logprob: float
    bytes: list[int] | None = None
    """Of UTF-8; null where the token is a part of a character and its bytes are not known."""
    top_logprobs: list[TopLogprob] = []
    token_id: int | UnsetType = UNSET


class ChatLogprobs(Answered):
    content: list[ChatLogprob] | None = None
    refusal: list[ChatLogprob] | None = None


class AnsweredFunction(Answered):
    name: str | None = None
    arguments: str | None = None


class AnsweredCall(Answered):
    id: str | None = None
    type: str | None = "function"
    function: AnsweredFunction = AnsweredFunction()
    index: int | UnsetType = UNSET
    """In chunks: which call this is a piece of."""


class AnsweredMessage(Answered):
    role: str | None = "assistant"
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    """Other servers' name for it; ours do not write it."""
    tool_calls: list[AnsweredCall] | UnsetType | None = UNSET


class ChatChoice(Answered, kw_only=True):
    index: int = 0
    message: AnsweredMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType | None = UNSET


class ChatResponse(Answered, kw_only=True):
    id: str = ""
    object: str = "chat.completion"
    created: int | float = 0
    model: str = ""
    choices: list[ChatChoice]
    usage: UsageBody | None = None
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class ChunkDelta(Answered):
    role: str | UnsetType | None = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    tool_calls: list[AnsweredCall] | UnsetType | None = UNSET


class ChunkChoice(Answered):
    index: int = 0
    delta: ChunkDelta = ChunkDelta()
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType | None = UNSET


class ChatChunk(Answered):
    id: str = ""
    object: str = "chat.completion.chunk"
    created: int | float = 0
    model: str = ""
    choices: list[ChunkChoice] = []
    usage: UsageBody | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET
    error: ErrorDetail | str | UnsetType | None = UNSET
    """A stream that broke ends with one of these."""
