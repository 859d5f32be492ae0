"""Sequences of equal length through an engine, step by step, with a clock beside them. Knows no model."""

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
    """What is asked of an engine."""

    def submit(self, tokens: Sequence[int], max_tokens: int) -> int:
        """A sequence that nothing but its length ends; returns its number."""
        ...

    def step(self) -> Sequence[int]:
        """The numbers of the sequences that got a token."""
        ...


class BatchTiming(Frozen):
    """What one batch took."""

    prefill_seconds: float
    """Until the last sequence had its first token."""
    prefill_steps: int
    step_seconds: tuple[float, ...]
    """Of the steps in which every sequence got one token and none was still reading its prompt."""
    mean_context_tokens: float
    """In the cache of a sequence during those steps."""

    @property
    def median_step_seconds(self) -> float:
        return statistics.median(self.step_seconds)


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """All different, so that none is found in the cache."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def run_batch(
    engine: StepEngine,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    clock: Clock = time.perf_counter,
    around_step: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> BatchTiming:
    """Everything is handed in at once, as a burst of requests would be."""
    begin = clock()
    waiting = {engine.submit(prompt, new_tokens): new_tokens for prompt in prompts}
    batch, unseen, prefill_seconds, prefill_steps = len(waiting), set(waiting), 0.0, 0
    full: list[float] = []
    contexts: list[float] = []
    while waiting:
        started = clock()
        with around_step():
            got = engine.step()
        ended = clock()
        if unseen:
            prefill_steps, prefill_seconds = prefill_steps + 1, ended - begin
        elif len(got) == batch:
            full.append(ended - started)
            contexts.append(len(prompts[0]) + new_tokens - statistics.fmean(waiting.values()))
        unseen -= set(got)
        _count_down(waiting, got)
    if not full:
        raise BadInput(f"{new_tokens} new tokens end before all {batch} prompts are read; measure with more --new-tokens")
    return BatchTiming(
        prefill_seconds=prefill_seconds,
        prefill_steps=prefill_steps,
        step_seconds=tuple(full),
        mean_context_tokens=statistics.fmean(contexts),
    )


def _count_down(waiting: dict[int, int], got: Sequence[int]) -> None:
    for number in got:
        waiting[number] -= 1
        if not waiting[number]:
            del waiting[number]
