"""Urgent sequences do not wait behind running ones that are less urgent, and these finish all the same."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_cache import SimulatedCache, check_accounts, check_budget

from windlass.runtime.engine.schedule.scheduler import MAX_YIELDS, ScheduledBatch, Scheduler, SchedulerLimits
from windlass.runtime.engine.schedule.sequence import Sequence

pytestmark = pytest.mark.pure


class Run:
    """A scheduler with a cache that notices wrong blocks, and what was sampled: a token says whose it is and where."""

    def __init__(self, **changes: Any) -> None:
        given: dict[str, Any] = {
            "num_blocks": 12, "context_tokens": 40, "block_tokens": 4, "max_sequences": 3, "max_step_tokens": 16, "max_step_logits": 8,
        }  # fmt: skip
        self.scheduler = Scheduler(SchedulerLimits(**(given | changes)))
        self.cache = SimulatedCache(self.scheduler.limits.num_blocks, self.scheduler.limits.block_tokens)
        self.finished: list[Sequence] = []
        self.count = 0

    def ask(self, priority: int = 0, prompt: int = 6, answer: int = 8, owner: str = "") -> Sequence:
        self.count += 1
        tokens = [1_000 * self.count + place for place in range(prompt)]
        new = Sequence(
            id=self.count, tokens=tokens, num_prompt=prompt, max_tokens=answer, priority=priority, owner=owner or f"{self.count}"
        )
        self.scheduler.submit(new)
        return new

    def step(self) -> ScheduledBatch:
        batch = self.scheduler.schedule()
        check_budget(batch, self.scheduler)
        check_accounts(self.scheduler)
        self.cache.compute(batch)
        self.scheduler.computed(batch)
        for chunk in batch.chunks:
            one = chunk.sequence
            if chunk.is_sampled and self.scheduler.append(one, 1_000 * one.id + len(one.tokens)):
                self.scheduler.remove(one)
                self.finished.append(one)
        return batch

    def finish(self) -> None:
        for _ in range(5_000):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("hung: not everybody finished")


def test_a_full_batch_makes_room_at_once() -> None:
    run = Run(max_sequences=2, num_blocks=32)
    old, young = run.ask(), run.ask()
    run.step()
    urgent = run.ask(-1)
    assert run.step().preempted == [young]
    assert run.scheduler.running == [old, urgent]
    run.finish()
    assert len(young.tokens) == 14
    assert young.num_yields == 1


def test_a_full_cache_makes_room_at_once() -> None:
    run = Run(num_blocks=8)
    less, least = run.ask(1, prompt=12), run.ask(2, prompt=8)
    run.step()
    run.step()
    urgent = run.ask(0, prompt=10)
    assert run.step().preempted == [least], "the least urgent yields, and no more of them than needed"
    assert urgent in run.scheduler.running
    assert less in run.scheduler.running
    run.finish()


def test_equals_wait() -> None:
    run = Run(max_sequences=1)
    first, second = run.ask(-1), run.ask(-1)
    for _ in range(3):
        assert not run.step().preempted
    assert run.scheduler.running == [first]
    run.finish()
    assert run.finished == [first, second]


def test_nobody_yields_in_vain() -> None:
    """The urgent one would not fit beside one that is as urgent, however many others gave way."""
    run = Run(num_blocks=10, max_step_tokens=40)
    run.ask(-1, prompt=20)
    run.ask(0, prompt=4)
    run.step()
    run.ask(-1, prompt=24)
    assert not run.step().preempted
    run.finish()


def test_a_growing_urgent_sequence_takes_blocks_of_the_least_urgent() -> None:
    run = Run(num_blocks=6, block_tokens=2, max_sequences=2)
    urgent, other = run.ask(-1, prompt=3, answer=7), run.ask(0, prompt=3, answer=7)
    run.finish()
    assert urgent.num_preemptions == 0
    assert other.num_preemptions > 0
    assert run.finished == [urgent, other]


@given(
    priorities=st.lists(st.integers(-4, 4), min_size=1, max_size=12),
    num_blocks=st.integers(10, 30),
    max_sequences=st.integers(1, 5),
    seed=st.integers(0, 10_000),
)
def test_what_is_preempted_is_less_urgent_and_all_finish(
    priorities: list[int], num_blocks: int, max_sequences: int, seed: int
) -> None:
    chance = random.Random(seed)
    run = Run(num_blocks=num_blocks, max_sequences=max_sequences)
    waiting = list(priorities)
    asked: list[tuple[Sequence, int]] = []
    while waiting:
        if chance.random() < 0.4:
            answer = chance.randint(1, 12)
            asked.append((run.ask(waiting.pop(), chance.randint(1, 20), answer), answer))
        before = {one.id: one.num_yields for one, _ in asked}
        batch = run.step()
        yielded = [one for one in batch.preempted if one.num_yields > before[one.id]]
        running = [*run.scheduler.running, *run.finished]
        assert not yielded or any(one.priority < min(y.priority for y in yielded) for one in running)
    run.finish()
    for one, answer in asked:
        assert one.num_yields <= MAX_YIELDS
        assert one.tokens == [1_000 * one.id + place for place in range(one.num_prompt + answer)], "nothing lost or repeated"


@given(seed=st.integers(0, 10_000))
def test_an_urgent_one_runs_in_the_next_step(seed: int) -> None:
    """Whatever runs and waits, as long as it is less urgent and has not yielded before: every sequence fits alone."""
    chance = random.Random(seed)
    run = Run(num_blocks=chance.randint(10, 30), max_sequences=chance.randint(1, 5))
    priority = chance.randint(0, 4)
    for _ in range(12):
        run.ask(priority, chance.randint(1, 20), chance.randint(4, 12))
        run.step()
    urgent = run.ask(-1, chance.randint(1, 20))
    run.step()
    assert urgent in run.scheduler.running
    run.finish()


@given(seed=st.integers(0, 10_000), owner=st.sampled_from(["crowd/x", "crowd/y", "other"]))
def test_a_patient_one_finishes_whatever_keeps_coming(seed: int, owner: str) -> None:
    chance = random.Random(seed)
    run = Run(max_sequences=2, num_blocks=16)
    patient = run.ask(4, owner=owner)
    for _ in range(3_000):
        while len(run.scheduler.waiting) < 3:
            run.ask(-4, chance.randint(1, 12), chance.randint(1, 8), owner="crowd/x")
        run.step()
        if patient in run.finished:
            return
    raise AssertionError("starved")
