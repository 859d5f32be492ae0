"""`POST /v1/completions`. Chunks have the same struct as complete responses."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from windlass.wire.schema.chat import ResponseFormat
from windlass.wire.schema.errors import ErrorDetail
from windlass.wire.schema.sampling import CommonRequest
from windlass.wire.schema.structs import Count, Natural, ResponseStruct
from windlass.wire.schema.usage import UsageBody


class CompletionRequest(CommonRequest, kw_only=True):
    prompt: str | list[str | Natural | list[Natural]]
    """A string, strings, token ids, or lists of token ids; not mixed."""
    echo: bool | None = None
    """The response starts with the prompt; with logprobs, includes those of the prompt."""
    logprobs: Annotated[int, Meta(ge=0, le=128)] | None = None
    response_format: ResponseFormat | None = None
    best_of: Count | None = None
    """Rejected unless equal to n."""
    suffix: str | None = None
    """Rejected unless empty."""
    metadata: dict[str, str] | None = None
    store: bool | None = None
    max_completion_tokens: Any = None
    messages: Any = None


class CompletionLogprobs(ResponseStruct):
    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class CompletionChoice(ResponseStruct):
    index: int = 0
    text: str = ""
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class CompletionResponse(ResponseStruct):
    id: str = ""
    object: str = "text_completion"
    created: int | float = 0
    model: str = ""
    choices: list[CompletionChoice] = []
    usage: UsageBody | UnsetType | None = UNSET
    system_fingerprint: str | UnsetType | None = UNSET
    error: ErrorDetail | str | UnsetType | None = UNSET
