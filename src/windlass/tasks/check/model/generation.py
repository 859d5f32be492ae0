"""Verdicts on one generation, on memory against the plan and on speed. Pure."""

from __future__ import annotations

from math import isfinite, log
from statistics import fmean

from windlass.core.model import Frozen
from windlass.tasks.check.report import Check, failed, passed, warned
from windlass.units import format_bytes, format_rate, format_seconds

NOISE = 0.6
"""A greedy token's mean surprise as a share of ln(vocabulary); noise is near 1, a model that works below 0.3."""
MEMORY_SLACK = 1.10
SLOW = 0.5
"""Of the predicted speed."""


class GenerationFacts(Frozen):
    load_seconds: float
    logprobs: tuple[float, ...]
    """Of the greedy tokens."""
    vocab_size: int
    num_prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float
    text: str = ""
    round_trips: bool | None = None
    """The prompt's tokens decode to the prompt again; None: there is no tokenizer."""
    memory_bytes: int = 0
    is_random: bool = False

    @property
    def decode_tokens_per_second(self) -> float:
        return (len(self.logprobs) - 1) / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.num_prompt_tokens / self.prefill_seconds if self.prefill_seconds > 0 else 0.0


def judge_generation(facts: GenerationFacts, planned_bytes: int = 0, planned_tokens_per_second: float = 0.0) -> list[Check]:
    rows = [passed("load", f"in {format_seconds(facts.load_seconds)}"), _sense(facts)]
    if facts.round_trips is False:
        rows.append(
            failed(
                "round trip",
                "the prompt's tokens do not decode to the prompt",
                "the same text",
                "the tokenizer is not this model's",
            )
        )
    rows += _memory(facts, planned_bytes)
    return [*rows, _speed(facts, planned_tokens_per_second)]


def _sense(facts: GenerationFacts) -> Check:
    if not facts.logprobs or not all(isfinite(value) for value in facts.logprobs):
        return failed(
            "generation",
            "NaN or infinite logits",
            "finite numbers",
            "weights or a kernel are broken; try --exact, then convert again",
        )
    surprise = -fmean(facts.logprobs) / log(max(facts.vocab_size, 2))
    shown = f"{len(facts.logprobs)} tokens, surprise {surprise:.0%} of noise{f': {facts.text[:40]!r}' if facts.text else ''}"
    if facts.is_random:
        return passed("generation", f"{len(facts.logprobs)} finite tokens (random weights)")
    if surprise > NOISE:
        return failed("generation", shown, f"below {NOISE:.0%}", "the weights are not this config's, or were converted wrongly")
    return passed("generation", shown)


def _memory(facts: GenerationFacts, planned: int) -> list[Check]:
    if not facts.memory_bytes or not planned:
        return []
    shown = f"{format_bytes(facts.memory_bytes)} used, {format_bytes(planned)} planned"
    if facts.memory_bytes > MEMORY_SLACK * planned:
        return [warned("memory", shown, "as planned", "leave more room: a smaller --context or --concurrency")]
    return [passed("memory", shown)]


def _speed(facts: GenerationFacts, planned: float) -> Check:
    rate = facts.decode_tokens_per_second
    shown = f"{format_rate(rate)} tokens/s, prefill {format_rate(facts.prefill_tokens_per_second)}"
    if planned and rate < SLOW * planned:
        return warned(
            "speed",
            shown,
            f"{format_rate(planned)} predicted",
            "another program uses this machine, or it throttles; see the rows above",
        )
    return passed("speed", shown, f"{format_rate(planned)} predicted" if planned else "")
