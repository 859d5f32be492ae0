"""`POST /v1/completions`: a text is continued. Chunks have the shape of whole answers."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import UNSET, Meta, UnsetType

from windlass.wire.schema.chat import ResponseFormat
from windlass.wire.schema.errors import ErrorDetail
from windlass.wire.schema.sampling import CommonRequest
from windlass.wire.schema.structs import Answered, Count, Natural
from windlass.wire.schema.usage import UsageBody


class CompletionRequest(CommonRequest, kw_only=True):
    prompt: str | list[str | Natural | list[Natural]]
    """A text, texts, token ids, or lists of token ids; no mixture."""
    echo: bool | None = None
    """The answer begins with the prompt; with logprobs, its tokens have theirs too."""
    logprobs: Annotated[int, Meta(ge=0, le=128)] | None = None
    response_format: ResponseFormat | None = None
    best_of: Count | None = None
    """Refused unless it is n: nothing is drawn that is not given out."""
    suffix: str | None = None
    """Refused unless empty."""
    metadata: dict[str, str] | None = None
    store: bool | None = None
    max_completion_tokens: Any = None
    messages: Any = None


class CompletionLogprobs(Answered):
    text_offset: list[int] = []
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class CompletionChoice(Answered):
    index: int = 0
    text: str = ""
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType | None = UNSET


class CompletionResponse(Answered):
    id: str = ""
    object: str = "text_completion"
    created: int | float = 0
    model: str = ""
    choices: list[CompletionChoice] = []
    usage: UsageBody | UnsetType | None = UNSET
    error: ErrorDetail | str | UnsetType | None = UNSET
