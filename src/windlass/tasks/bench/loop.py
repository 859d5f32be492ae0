"""Times a batch of sequences of equal length, step by step. Knows no model."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from windlass.core.model import Frozen
from windlass.errors import BadInput

Clock = Callable[[], float]


class StepEngine(Protocol):
    """What the timing loop needs from an engine."""

    def submit(self, tokens: Sequence[int], max_tokens: int) -> int:
        """Adds a sequence that only its length ends; returns its id."""
        ...

    def step(self) -> Sequence[int]:
        """Ids of the sequences that got a token, once for each token."""
        ...


class BatchTiming(Frozen):
    """Timing of one batch."""

    prefill_seconds: float
    """Until every sequence had its first token."""
    prefill_steps: int
    step_seconds: tuple[float, ...]
    """Of pure decode steps: every sequence got a token, none was in prefill."""
    mean_context_tokens: float
    """Average cached tokens per sequence during those steps."""
    tokens_per_step: float = 1.0
    """Of each sequence: more than one with speculation."""

    @property
    def median_step_seconds(self) -> float:
        return statistics.median(self.step_seconds)


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """All different, so that the prefix cache is never hit."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def run_batch(
    engine: StepEngine,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    clock: Clock = time.perf_counter,
    around_step: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> BatchTiming:
    """Submits all prompts at once, like a burst of requests."""
    begin = clock()
    waiting = {engine.submit(prompt, new_tokens): new_tokens for prompt in prompts}
    batch, unseen, prefill_seconds, prefill_steps = len(waiting), set(waiting), 0.0, 0
    full: list[float] = []
    num_tokens = 0
    contexts: list[float] = []
    while waiting:
        started = clock()
        with around_step():
            got = engine.step()
        ended = clock()
        if unseen:
            prefill_steps, prefill_seconds = prefill_steps + 1, ended - begin
        elif len(set(got)) == batch:
            full.append(ended - started)
            num_tokens += len(got)
            contexts.append(len(prompts[0]) + new_tokens - statistics.fmean(waiting.values()))
        unseen -= set(got)
        _count_down(waiting, got)
    if not full:
        raise BadInput(f"{new_tokens} new tokens are generated before all {batch} prompts are prefilled; increase --new-tokens")
    return BatchTiming(
        prefill_seconds=prefill_seconds,
        prefill_steps=prefill_steps,
        step_seconds=tuple(full),
        mean_context_tokens=statistics.fmean(contexts),
        tokens_per_step=num_tokens / (batch * len(full)),
    )


def _count_down(waiting: dict[int, int], got: Sequence[int]) -> None:
    for number in got:
        waiting[number] -= 1
        if not waiting[number]:
            del waiting[number]
