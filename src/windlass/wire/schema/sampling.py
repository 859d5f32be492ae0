"""Parameters that chat and text completion requests share."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from windlass.wire.schema.structs import (
    Bias,
    Count,
    Fraction,
    Natural,
    Penalty,
    Positive,
    Priority,
    Repetition,
    RequestStruct,
    Share,
    Temperature,
    TopK,
)


class StreamOptions(RequestStruct):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Rejected if true: chunks are not padded."""
    continuous_usage_stats: bool | None = None
    """vLLM's: every chunk has the usage so far."""


class StructuredOutputs(RequestStruct):
    """An extension, as in vLLM. Exactly one field."""

    json: dict[str, Any] | str | bool | None = None
    """A JSON schema, as an object or as a string."""
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None
    """Lark or GBNF syntax."""
    json_object: bool | None = None


class CommonRequest(RequestStruct):
    model: str = ""
    """Empty: the served model."""
    temperature: Temperature | None = None
    top_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[Natural, Bias] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: Natural | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Identifies the end user for fair sharing: the engine's tokens are shared equally between users. Not stored."""

    # Extensions that vLLM and similar servers have too.
    top_k: TopK | None = None
    """-1 or 0: no limit."""
    min_p: Fraction | None = None
    repetition_penalty: Repetition | None = None
    stop_token_ids: list[Natural] | None = None
    min_tokens: Natural | None = None
    """The model's own and the request's stop tokens are not sampled before."""
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    """Adds `token_ids` to choices, `prompt_token_ids` to responses where known, and `token_id` to logprobs."""
    priority: Priority | None = None
    """Lower is more urgent. A key's own priority is the most urgent that its requests can have."""
    timeout: Positive | None = None
    """Windlass only: the request's deadline in seconds."""

    # Parameters of other servers; values that would have an effect are rejected (wire/server/unsupported.py).
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    truncate_prompt_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
