"""Requests before the first: between them every kind of step."""

from __future__ import annotations

import pytest
from fake_decoder import make_engine

from windlass.core.constants import BLOCK_TOKENS
from windlass.engine.schedule.scheduler import ScheduledBatch, SchedulerLimits
from windlass.engine.warm_up import BEGUN, FEW_PROMPTS, NUM_TOKENS, warm_up_requests

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


def test_where_kernels_are_compiled_there_are_fewer() -> None:
    found, usual = lengths(limits(2048), prepared=True), lengths(limits(2048))
    assert {2, 80, 2048, *(2048 + rest for rest in BEGUN)} <= set(found) and sum(found) < sum(usual) / 1.5


@pytest.mark.parametrize("step", [512, 2048])
def test_and_the_second_step_of_a_prompt_comes_without_the_first(step: int) -> None:
    """Its tokens are in the prefix cache; all others begin differently."""
    engine = make_engine(num_blocks=512, context_tokens=4096, max_sequences=8, max_step_tokens=step)
    engine.runner.is_prepared = True
    scheduler, computed = engine.scheduler, list[int]()
    schedule = scheduler.schedule

    def noted() -> ScheduledBatch:
        batch = schedule()
        computed.extend(chunk.stop - chunk.start for chunk in batch.chunks if chunk.stop - chunk.start > 1)
        return batch

    scheduler.schedule = noted  # type: ignore[method-assign]
    engine.try_steps()
    asked = lengths(limits(step), prepared=True)
    longest = max(length for length in asked if length <= step) // BLOCK_TOKENS * BLOCK_TOKENS
    assert {step + rest for rest in BEGUN} <= set(asked)
    assert sum(computed) <= sum(asked) - len(BEGUN) * longest
