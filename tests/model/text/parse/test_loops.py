"""Answers that repeat themselves, and answers that only look like it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.model.text.parse.loops import LEAST_TIMES, LEAST_TOKENS, LONGEST_PERIOD, LoopDetector, loop_period

pytestmark = pytest.mark.pure


@given(st.lists(st.integers(0, 50_000), min_size=1, max_size=LONGEST_PERIOD), st.lists(st.integers(0, 50_000), max_size=40))
def test_every_repetition_is_found(unit: list[int], before: list[int]) -> None:
    times = max(LEAST_TIMES, -(-LEAST_TOKENS // len(unit)))
    period = loop_period(before + unit * times)
    assert 0 < period <= len(unit)
    assert (unit * 2)[period : period + len(unit)] == unit, "a shorter period repeats the unit, too"


@given(st.lists(st.integers(0, 50_000), unique=True, max_size=600))
def test_tokens_that_are_all_different_are_no_loop(tokens: list[int]) -> None:
    assert loop_period(tokens) == 0


@pytest.mark.parametrize(
    "tokens",
    [
        [7] * (LEAST_TOKENS - 1),  # a row of zeros in code
        [1, 2, 3, 4, 5] * (LEAST_TOKENS // 5),  # one token short
        list(range(40)) * 3,  # a refrain, three times
        [token for line in range(40) for token in (1, 2, line, 3)],  # a table whose numbers differ
    ],
)
def test_what_repeats_a_little_is_no_loop(tokens: list[int]) -> None:
    assert loop_period(tokens) == 0


def test_a_detector_is_told_as_the_tokens_come() -> None:
    detector = LoopDetector()
    assert [detector.add([token]) for token in range(200)] == [0] * 200
    found = [detector.add([900 + step % 3]) for step in range(LEAST_TOKENS + LoopDetector.EVERY)]
    assert 3 in found and found.index(3) >= LEAST_TOKENS - 1
