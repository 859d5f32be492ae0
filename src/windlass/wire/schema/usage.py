"""Token usage, as the API counts it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from windlass.core.request import Usage
from windlass.wire.schema.structs import ResponseStruct


class PromptDetails(ResponseStruct):
    cached_tokens: int | None = 0


class CompletionDetails(ResponseStruct):
    reasoning_tokens: int | None = 0


class UsageBody(ResponseStruct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptDetails | UnsetType | None = UNSET
    completion_tokens_details: CompletionDetails | UnsetType | None = UNSET
    energy_joules: float | UnsetType = UNSET
    """Ours: energy attributed to the request (`windlass serve --usage-energy`)."""


def usage_body(usages: Sequence[Usage], n: int = 1) -> UsageBody:
    """Summed over choices; each prompt, shared by `n` choices in a row, is counted once."""
    prompt = sum(usage.prompt_tokens for usage in usages[::n])
    completion = sum(usage.completion_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages[::n])
    energy = [usage.energy_joules for usage in usages if usage.energy_joules is not None]
    return UsageBody(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(cached_tokens=cached),
        completion_tokens_details=CompletionDetails(reasoning_tokens=sum(usage.reasoning_tokens for usage in usages)),
        energy_joules=round(sum(energy), 3) if energy else UNSET,
    )


def read_usage(body: UsageBody) -> Usage:
    details = body.prompt_tokens_details
    cached = details.cached_tokens if isinstance(details, PromptDetails) else 0
    written = body.completion_tokens_details
    reasoning = written.reasoning_tokens if isinstance(written, CompletionDetails) else 0
    return Usage(
        prompt_tokens=body.prompt_tokens,
        completion_tokens=body.completion_tokens or 0,
        cached_tokens=cached or 0,
        reasoning_tokens=reasoning or 0,
    )
