"""The timing loop with an engine whose every step takes a known time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from windlass.errors import BadInput
from windlass.tasks.bench.loop import random_prompts, run_batch

pytestmark = pytest.mark.pure


class FakeEngine:
    """Reads so many prompts a step, taking 100 s for it; a step of decoding takes 1 s, and 1/8 s more for each sequence."""

    def __init__(self, prompts_a_step: int = 2) -> None:
        self.now, self.prompts_a_step = 0.0, prompts_a_step
        self.left: dict[int, int] = {}
        self.unread: list[int] = []
        self.submitted: list[tuple[Sequence[int], int]] = []

    def submit(self, tokens: Sequence[int], max_tokens: int) -> int:
        number = len(self.submitted)
        self.submitted.append((tokens, max_tokens))
        self.left[number] = max_tokens
        self.unread.append(number)
        return number

    def step(self) -> Sequence[int]:
        reading, self.unread = self.unread[: self.prompts_a_step], self.unread[self.prompts_a_step :]
        got = [number for number, count in self.left.items() if count and number not in self.unread]
        self.now += 100.0 if reading else 1.0 + len(got) / 8
        for number in got:
            self.left[number] -= 1
        return got


def test_reading_and_decoding_are_told_apart() -> None:
    engine = FakeEngine()
    found = run_batch(engine, [[1] * 10] * 4, 6, clock=lambda: engine.now)
    assert found.prefill_seconds == 200.0 and found.prefill_steps == 2
    assert found.step_seconds == (1.5,) * 4  # the last step has only the two that began later
    assert found.median_step_seconds == 1.5
    # In full steps the first two have 2, 3, 4, 5 tokens before, the others 1, 2, 3, 4; ten of the prompt.
    assert found.mean_context_tokens == pytest.approx(10 + 3.0)
    assert all(max_tokens == 6 for _, max_tokens in engine.submitted)


def test_too_few_new_tokens_are_refused() -> None:
    engine = FakeEngine(prompts_a_step=1)
    with pytest.raises(BadInput, match="increase --new-tokens"):
        run_batch(engine, [[1]] * 3, 2, clock=lambda: engine.now)


def test_prompts_are_different_and_repeatable() -> None:
    made = random_prompts(5, 20, 100, seed=1)
    assert len({tuple(prompt) for prompt in made}) == 5 and made == random_prompts(5, 20, 100, seed=1)
    assert all(len(prompt) == 20 and min(prompt) >= 0 and max(prompt) < 100 for prompt in made)
