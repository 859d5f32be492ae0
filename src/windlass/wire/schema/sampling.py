"""What requests of both kinds, chats and completions, have in common."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from windlass.wire.schema.structs import (
    Asked,
    Bias,
    Count,
    Fraction,
    Natural,
    Penalty,
    Positive,
    Repetition,
    Share,
    Temperature,
    TopK,
)


class StreamOptions(Asked):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Refused when true: chunks are not padded."""
    continuous_usage_stats: bool | None = None
    """Refused when true."""


class StructuredOutputs(Asked):
    """An extension that vLLM's server has too. Exactly one of them."""

    json: dict[str, Any] | str | bool | None = None
    """A schema, or a text that is one."""
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None
    """In Lark's form."""
    json_object: bool | None = None


class CommonRequest(Asked):
    model: str = ""
    """Empty: the one that is served."""
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
    """Taken and kept nowhere."""

    # Extensions that other servers of open weights have too.
    top_k: TopK | None = None
    """-1 and 0: all."""
    min_p: Fraction | None = None
    repetition_penalty: Repetition | None = None
    stop_token_ids: list[Natural] | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    """Choices then have `token_ids`, answers `prompt_token_ids` where they are known, logprobs `token_id`."""
    timeout: Positive | None = None
    """Ours: seconds until an answer that is not whole ends with an error."""

    # Known elsewhere; refused where they ask for what is not done here (wire/server/unsupported.py).
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    priority: int | None = None
    truncate_prompt_tokens: int | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    return_tokens_as_token_ids: bool | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
