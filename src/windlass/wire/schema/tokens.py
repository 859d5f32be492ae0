"""`POST /tokenize` and `/detokenize`, as in vLLM."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from windlass.wire.schema.chat import ChatMessage
from windlass.wire.schema.structs import Natural, RequestStruct, ResponseStruct


class TokenizeRequest(RequestStruct):
    """Exactly one of prompt and messages."""

    model: str = ""
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    return_token_strs: bool | None = None
    # Rejected unless they match the behaviour.
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class TokenizeResponse(ResponseStruct, kw_only=True):
    count: int
    max_model_len: int = 0
    tokens: list[int]
    token_strs: list[str] | UnsetType | None = UNSET


class DetokenizeRequest(RequestStruct, kw_only=True):
    model: str = ""
    tokens: list[Natural]


class DetokenizeResponse(ResponseStruct):
    prompt: str


class InputTokens(ResponseStruct, kw_only=True):
    object: str
    input_tokens: int
