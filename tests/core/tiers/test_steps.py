"""Prompt tokens of a step beside host memory: what the planner and the engine share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.tiers.steps import LEAST_STEP_TOKENS, STEP_TOKENS, most_step_tokens, offload_step_tokens
from windlass.open.resolve import describe_model
from windlass.units import GB

pytestmark = pytest.mark.pure


def test_a_prompt_of_4096_takes_two_steps_under_24_gb() -> None:
    """As measured: 2,798 tokens/s where one step would read 5,400 (docs/reference/offload.md)."""
    spec = describe_model("GLM-4.5-Air").spec
    assert 2048 < offload_step_tokens(spec, 24 * GB) < 4096
    assert offload_step_tokens(spec, 141 * GB) == STEP_TOKENS
    assert offload_step_tokens(describe_model("Llama-3.1-405B").spec, 141 * GB) == 2048


@given(st.integers(10_000, 2_000_000), st.integers(GB, 300 * GB))
def test_steps_grow_with_the_device_within_their_limits(row: int, cap: int) -> None:
    tokens = most_step_tokens(row, cap)
    assert LEAST_STEP_TOKENS <= tokens <= STEP_TOKENS and tokens % 256 == 0
    assert tokens <= most_step_tokens(row, 2 * cap)
    assert tokens == LEAST_STEP_TOKENS or tokens * row * 24 <= cap * 1.0001
