"""One question to one Client: a generated answer, or the log-probabilities of choices. Does not retry and does not grade."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from hashlib import blake2b

import msgspec

from windlass.core.client import Broken, Client
from windlass.core.model import Frozen
from windlass.core.request import GREEDY, Delta, Request, Sampling, ScoreRequest, TokenLogprob, Usage
from windlass.errors import BadInput
from windlass.tasks.evaluate.run.records import Tokens
from windlass.tasks.evaluate.run.settings import Settings
from windlass.tasks.evaluate.tasks.questions import Question
from windlass.tasks.evaluate.tasks.task import Task

MAX_SEED = 2**31
ENGINE_TOP, SERVER_TOP, OTHER_TOP = 100, 20, 5
"""Alternatives at one position: our engine returns up to 128, our server and vLLM 20, OpenAI's completions 5."""


class Reply(Frozen):
    answer: str = ""
    reasoning: str = ""
    finish: str = ""
    choices: dict[str, float] = {}
    confidence: dict[str, float] = {}
    tokens: Tokens = Tokens()
    seconds: float = 0.0


class Asking(Frozen):
    """How every question of a task is asked."""

    task: Task
    settings: Settings
    max_tokens: int
    deadline_seconds: float
    top: int = OTHER_TOP
    confidence: Callable[[Sequence[float]], dict[str, float]] | None = None
    """From the log-probabilities of an answer's tokens; None: they are not asked for."""


async def ask(client: Client, question: Question, sample: int, how: Asking) -> Reply:
    begin = time.monotonic()
    reply = await (_choose(client, question, how) if how.task.grader == "choice" else _generate(client, question, sample, how))
    return msgspec.structs.replace(reply, seconds=round(time.monotonic() - begin, 4))


def sampling_for(settings: Settings, question: Question, sample: int) -> Sampling:
    """Greedy, or with a seed of its own for every question and sample, so that a resumed run draws the same."""
    if settings.temperature == 0:
        return GREEDY
    text = f"{settings.seed}\0{question.task}\0{question.id}\0{sample}"
    seed = int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "little") % MAX_SEED
    return Sampling(temperature=settings.temperature, top_p=0.95, seed=seed)


async def _generate(client: Client, question: Question, sample: int, how: Asking) -> Reply:
    is_chat = question.messages is not None
    request = Request(
        messages=question.messages,
        prompt=question.prompt,
        sampling=sampling_for(how.settings, question, sample),
        max_tokens=how.max_tokens,
        stop=() if is_chat else how.task.prompt.stop,
        thinking=how.settings.thinking if is_chat else None,
        deadline_seconds=how.deadline_seconds,
        logprobs=None if how.confidence is None else 0,
    )
    deltas = await _collect(client, request)
    logprobs = [entry.logprob for delta in deltas for entry in delta.logprobs]
    return Reply(
        confidence=how.confidence(logprobs) if how.confidence is not None else {},
        answer="".join(delta.content for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        finish=deltas[-1].finish_reason or "",
        tokens=_tokens(deltas[-1].usage),
    )


async def _collect(client: Client, request: Request) -> list[Delta]:
    """Of an answer that came to its end. Part of one is none: it would be graded as if the model had said no more."""
    async with aclosing(client.generate(request)) as stream:
        deltas = [delta async for delta in stream]
    finish = deltas[-1].finish_reason if deltas else None
    if finish not in ("stop", "length"):
        raise Broken(f"the answer did not come to its end ({finish or 'no reason given'})")
    return deltas


def _tokens(usage: Usage | None) -> Tokens:
    if usage is None:
        return Tokens()
    return Tokens(prompt=usage.prompt_tokens, answer=usage.completion_tokens, cached=usage.cached_tokens)


# --- choices ---------------------------------------------------------------------------------------------------------


async def _choose(client: Client, question: Question, how: Asking) -> Reply:
    """One generated token has the choices among its alternatives, usually; then one request is enough for all of them."""
    assert question.prompt is not None
    request = Request(
        prompt=question.prompt, sampling=GREEDY, max_tokens=1, logprobs=how.top, deadline_seconds=how.deadline_seconds
    )
    deltas = await _collect(client, request)
    entries = [entry for delta in deltas for entry in delta.logprobs]
    if not entries:
        raise BadInput(f"the server returns no log-probabilities, which task {question.task} needs; leave the task out")
    found = among(entries[0], how.task.choices)
    missing = [choice for choice in how.task.choices if choice not in found]
    found |= await score_choices(client, question.prompt, how.task.choices, missing)
    choices = {choice: found[choice] for choice in how.task.choices}
    return Reply(choices=choices, tokens=_tokens(deltas[-1].usage), finish="length")


def among(entry: TokenLogprob, choices: tuple[str, ...]) -> dict[str, float]:
    """Those that are one token, with exactly this text: some tokenizers show ` A` and `A` alike, and then this finds none."""
    known = {other.token: other.logprob for other in (*entry.top, entry)}
    return {choice: known[choice] for choice in choices if choice in known}


async def score_choices(client: Client, context: str, choices: Sequence[str], wanted: Sequence[str]) -> dict[str, float]:
    """Summed over the tokens behind the context, context and choice encoded as one text, as lm-evaluation-harness does."""
    if not wanted:
        return {}
    encoded = await _encode(client, [context + choice for choice in choices])
    if encoded is None:
        return {choice: await _score_text(client, context, choice) for choice in wanted}
    start = _num_common(encoded)
    return {choice: await _score_ids(client, encoded[choices.index(choice)], start) for choice in wanted}


async def _encode(client: Client, texts: Sequence[str]) -> list[list[int]] | None:
    """None where the client cannot tokenize."""
    tokenize = getattr(client, "tokenize", None)
    if tokenize is None:
        return None
    try:
        return [await tokenize(text) for text in texts]
    except BadInput:
        return None


def _num_common(encoded: Sequence[Sequence[int]]) -> int:
    """Tokens that all begin with: the context."""
    differing = (place for place, ids in enumerate(zip(*encoded, strict=False)) if len(set(ids)) > 1)
    return next(differing, min(map(len, encoded)))


async def _score_ids(client: Client, ids: Sequence[int], start: int) -> float:
    scores = await client.score(ScoreRequest(token_ids=tuple(ids), start=start))
    return sum(entry.logprob for entry in scores.logprobs[start:] if entry is not None)


async def _score_text(client: Client, context: str, choice: str) -> float:
    """The last tokens whose texts cover the choice."""
    scores = await client.score(ScoreRequest(prompt=context + choice))
    total, covered = 0.0, 0
    for entry in reversed(scores.logprobs):
        if entry is None or covered >= len(choice):
            break
        total, covered = total + entry.logprob, covered + len(entry.token)
    return total
