"""Echoed completions -> the prompt's log-probabilities, separated from the output's."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UnsetType

from windlass.core.client import Unavailable
from windlass.core.request import Delta, Request, ScoreRequest, Scores, TokenLogprob
from windlass.errors import BadInput
from windlass.wire.client.stream_reader import read_finish_reason
from windlass.wire.schema.completions import CompletionChoice
from windlass.wire.schema.logprobs import NO_ID, read_completion_logprobs
from windlass.wire.schema.usage import UsageBody, read_usage

Entries = tuple[TokenLogprob | None, ...]


def scores_of(
    choice: CompletionChoice, request: ScoreRequest, token_ids: Sequence[int], usage: UsageBody | UnsetType | None
) -> Scores:
    """`token_ids` may be empty (unknown). Tokens that a server generated despite max_tokens=0 are dropped."""
    entries = _entries(choice)
    count = _num_prompt(entries, request, usage)
    ids = tuple(token_ids) if len(token_ids) == count else (NO_ID,) * count
    found = [_named(entry, number, request.top) for entry, number in zip(entries[:count], ids, strict=True)]
    skipped = min(request.start, count)
    return Scores(token_ids=ids, logprobs=(None,) * skipped + tuple(found[skipped:]))


def echoed_delta(choice: CompletionChoice, request: Request, usage: UsageBody | UnsetType | None) -> Delta:
    entries = _entries(choice)
    count = _num_prompt(entries, request, usage)
    ids = request.token_ids if request.token_ids is not None else (NO_ID,) * count
    prompt = [_named(entry, number, request.prompt_logprobs or 0) for entry, number in zip(entries[:count], ids, strict=True)]
    for number in range(min(request.prompt_logprobs_start, count)):
        prompt[number] = None
    answer = _answer(entries[count:], tuple(choice.token_ids or ()), request.logprobs)
    return Delta(
        content=_text_behind(choice, request, count),
        token_ids=tuple(choice.token_ids or ()),
        logprobs=answer,
        prompt_logprobs=tuple(prompt),
        finish_reason=read_finish_reason(choice.finish_reason),
        usage=read_usage(usage) if isinstance(usage, UsageBody) else None,
    )


def _entries(choice: CompletionChoice) -> Entries:
    if choice.logprobs is None:
        raise BadInput("the server returns no log-probabilities of prompts (echo with logprobs), so it cannot score")
    return read_completion_logprobs(choice.logprobs)


def _num_prompt(entries: Entries, request: Request | ScoreRequest, usage: UsageBody | UnsetType | None) -> int:
    if request.token_ids is None:
        return min(usage.prompt_tokens, len(entries)) if isinstance(usage, UsageBody) else len(entries)
    if len(request.token_ids) > len(entries):
        raise Unavailable(f"the server scored {len(entries)} of {len(request.token_ids)} tokens")
    return len(request.token_ids)


def _answer(entries: Entries, token_ids: tuple[int, ...], top: int | None) -> tuple[TokenLogprob, ...]:
    if top is None:
        return ()
    ids = token_ids if len(token_ids) == len(entries) else (None,) * len(entries)
    named = (_named(entry, number, top) for entry, number in zip(entries, ids, strict=True))
    return tuple(entry for entry in named if entry is not None)


def _named(entry: TokenLogprob | None, token_id: int | None, top: int) -> TokenLogprob | None:
    """With its id, and at most `top` alternatives: the API adds the token itself to them."""
    if entry is None:
        return None
    number = entry.token_id if token_id is None else token_id
    tops = tuple(
        msgspec.structs.replace(other, token_id=number) if other.token == entry.token else other for other in entry.top[:top]
    )
    return msgspec.structs.replace(entry, token_id=number, top=tops)


def _text_behind(choice: CompletionChoice, request: Request, count: int) -> str:
    if request.prompt is not None and choice.text.startswith(request.prompt):
        return choice.text[len(request.prompt) :]
    offsets = choice.logprobs.text_offset if choice.logprobs is not None else []
    return choice.text[offsets[count] :] if count < len(offsets) else ""
