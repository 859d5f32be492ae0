"""Requests before the first: between them every kind of step."""

from __future__ import annotations

import pytest

from windlass.runtime.engine.schedule.scheduler import SchedulerLimits
from windlass.runtime.engine.warm_up import BEGUN, FEW_PROMPTS, NUM_TOKENS, warm_up_requests

pytestmark = pytest.mark.cpu


def limits(step: int, blocks: int = 4096, context: int = 32768) -> SchedulerLimits:
    return SchedulerLimits(num_blocks=blocks, context_tokens=context, max_sequences=8, max_step_tokens=step)


def lengths(found: SchedulerLimits, **how: bool) -> list[int]:
    return [len(request.token_ids) for group in warm_up_requests(found, 1000, **how) for request in group]


@pytest.mark.parametrize("step", [256, 2048, 8192])
def test_some_prompts_take_two_steps(step: int) -> None:
    """The second reads what the first has stored: attention of its own."""
    assert {step + rest for rest in BEGUN} <= set(lengths(limits(step)))


@pytest.mark.parametrize("context", [16, 700, 2100])
def test_no_prompt_is_longer_than_a_sequence_may_be(context: int) -> None:
    found = lengths(limits(2048, context=context))
    assert found and max(found) <= context - NUM_TOKENS


def test_where_each_prompt_takes_seconds_there_are_few() -> None:
    found = lengths(limits(2048), few=True)
    assert {*FEW_PROMPTS, *(2048 + rest for rest in BEGUN)} <= set(found) and len(found) < len(lengths(limits(2048))) / 2
