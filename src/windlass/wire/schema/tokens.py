"""`POST /tokenize` and `/detokenize`, shaped as vLLM's server has them."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from windlass.wire.schema.chat import Message
from windlass.wire.schema.structs import Answered, Asked, Natural


class TokenizeRequest(Asked):
    """Exactly one of prompt and messages."""

    model: str = ""
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    return_token_strs: bool | None = None
    # Refused unless they say what is done anyway.
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class TokenizeResponse(Answered, kw_only=True):
    count: int
    max_model_len: int = 0
    tokens: list[int]
    token_strs: list[str] | UnsetType | None = UNSET


class DetokenizeRequest(Asked, kw_only=True):
    model: str = ""
    tokens: list[Natural]


class DetokenizeResponse(Answered):
    prompt: str
