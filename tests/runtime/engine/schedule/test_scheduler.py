from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulated_cache import SimulatedCache, check_accounts, check_budget

from windlass.errors import BadInput
from windlass.runtime.engine.schedule.scheduler import ScheduledBatch, Scheduler, SchedulerLimits
from windlass.runtime.engine.schedule.sequence import Sequence

pytestmark = pytest.mark.pure


def limits(**changes: Any) -> SchedulerLimits:
    given: dict[str, Any] = {
        "num_blocks": 16, "context_tokens": 64, "block_tokens": 4, "max_sequences": 4, "max_step_tokens": 8, "max_step_logits": 6,
    }  # fmt: skip
    return SchedulerLimits(**(given | changes))


def sequence(number: int, tokens: list[int], max_tokens: int = 4, **more: Any) -> Sequence:
    return Sequence(id=number, tokens=list(tokens), num_prompt=len(tokens), max_tokens=max_tokens, **more)


def step(scheduler: Scheduler, cache: SimulatedCache | None = None, token: int = 7) -> tuple[ScheduledBatch, list[int]]:
    """One step in which every sampled token is `token`; gives the ids that finished."""
    batch = scheduler.schedule()
    check_budget(batch, scheduler)
    check_accounts(scheduler)
    if cache:
        cache.compute(batch)
    scheduler.computed(batch)
    finished: list[int] = []
    for chunk in batch.chunks:
        if chunk.is_sampled and scheduler.append(chunk.sequence, token):
            scheduler.remove(chunk.sequence)
            finished.append(chunk.sequence.id)
    check_accounts(scheduler)
    return batch, finished


def shape(batch: ScheduledBatch) -> list[tuple[int, int, int]]:
    return [(chunk.sequence.id, chunk.start, chunk.stop) for chunk in batch.chunks]


def test_a_long_prompt_is_read_in_chunks() -> None:
    scheduler = Scheduler(limits())
    scheduler.submit(sequence(1, list(range(20)), max_tokens=2))
    shapes = [shape(step(scheduler)[0]) for _ in range(4)]
    assert shapes == [[(1, 0, 8)], [(1, 8, 16)], [(1, 16, 20)], [(1, 20, 21)]]
    assert not scheduler.has_work


def test_answers_go_on_while_a_prompt_is_read() -> None:
    scheduler = Scheduler(limits())
    scheduler.submit(sequence(1, [1, 2], max_tokens=10))
    step(scheduler)
    scheduler.submit(sequence(2, list(range(20))))
    assert shape(step(scheduler)[0]) == [(1, 2, 3), (2, 0, 7)]
    assert shape(step(scheduler)[0]) == [(1, 3, 4), (2, 7, 14)]


def test_prompts_that_fit_share_a_step() -> None:
    scheduler = Scheduler(limits())
    for number in range(1, 4):
        scheduler.submit(sequence(number, [number] * 3))
    assert shape(step(scheduler)[0]) == [(1, 0, 3), (2, 0, 3), (3, 0, 2)]
    assert shape(step(scheduler)[0]) == [(1, 3, 4), (2, 3, 4), (3, 2, 3)]  # two tokens decode; the third prompt's last one


def test_first_come_first_served_even_if_a_later_one_would_fit() -> None:
    scheduler = Scheduler(limits(num_blocks=6))
    scheduler.submit(sequence(1, list(range(8)), max_tokens=3))
    scheduler.submit(sequence(2, list(range(50, 70)), max_tokens=3))
    scheduler.submit(sequence(3, [1], max_tokens=1))
    step(scheduler)
    assert [waiting.id for waiting in scheduler.waiting] == [2, 3]


def test_no_more_sequences_than_allowed() -> None:
    scheduler = Scheduler(limits())
    for number in range(9):
        scheduler.submit(sequence(number, [number]))
    batch, _ = step(scheduler)
    assert len(batch.chunks) == 4
    assert len(scheduler.waiting) == 5


def test_the_youngest_gives_way_and_comes_back() -> None:
    scheduler = Scheduler(limits(num_blocks=4, context_tokens=16))
    cache = SimulatedCache(4, 4)
    scheduler.submit(sequence(1, [1, 2, 3], max_tokens=9))
    scheduler.submit(sequence(2, [4, 5, 6], max_tokens=9))
    finished: list[int] = []
    while scheduler.has_work:
        finished += step(scheduler, cache)[1]
    assert finished == [1, 2]
    assert scheduler.num_preemptions >= 1
    assert scheduler.pool.num_free == 4


def test_a_preempted_sequence_finds_its_own_prefix_again() -> None:
    scheduler = Scheduler(limits(num_blocks=6, context_tokens=24))
    scheduler.submit(sequence(1, [1] * 4, max_tokens=12))
    scheduler.submit(sequence(2, [2] * 8, max_tokens=12))
    while not scheduler.num_preemptions and scheduler.has_work:
        step(scheduler)
    assert scheduler.waiting.next.id == 2
    while scheduler.has_work:
        step(scheduler)
    assert scheduler.prefix_hit_tokens > 0


def test_a_prefix_is_computed_once() -> None:
    scheduler = Scheduler(limits(max_step_tokens=64))
    cache = SimulatedCache(16, 4)
    scheduler.submit(sequence(1, list(range(10)), max_tokens=1))
    step(scheduler, cache)
    second = sequence(2, [*range(8), 77], max_tokens=1)
    scheduler.submit(second)
    assert shape(step(scheduler, cache)[0]) == [(2, 8, 9)]
    assert second.num_cached == 8


def test_scored_prompts_get_logits_for_every_token_and_never_too_many() -> None:
    scheduler = Scheduler(limits(max_step_tokens=32))
    scored = sequence(1, list(range(20)), max_tokens=0, scored_from=0)
    scheduler.submit(scored)
    rows: list[int] = []
    for _ in range(4):
        batch = scheduler.schedule()
        check_budget(batch, scheduler)
        rows += [row for chunk in batch.chunks for row in range(chunk.logits_from, chunk.stop)]
        scheduler.computed(batch)
    assert rows == list(range(20))
    assert scored.num_scored == 20


def test_only_what_is_scored_has_to_be_computed_again() -> None:
    scheduler = Scheduler(limits(max_step_tokens=32))
    scheduler.submit(sequence(1, list(range(20)), max_tokens=1))
    step(scheduler)
    for start, computed_from in ((0, 0), (9, 8), (10, 8), (12, 8), (13, 12), (19, 16)):
        scored = sequence(2, list(range(20)), max_tokens=0, scored_from=start)
        scheduler.submit(scored)
        chunk = scheduler.schedule().chunks[0]
        assert chunk.start == computed_from
        assert chunk.logits_from == max(start - 1, 0)
        scheduler.remove(scored)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "words"),
    [(64, 1, "64 tokens plus max_tokens 1 does not fit in 64 tokens"), (0, 1, "empty"), (1, 64, "lower max_tokens")],
)
def test_what_could_never_finish_is_refused(prompt: int, max_tokens: int, words: str) -> None:
    scheduler = Scheduler(limits())
    with pytest.raises(BadInput, match=words):
        scheduler.submit(sequence(1, [1] * prompt, max_tokens))
    assert not scheduler.has_work


def test_a_cache_smaller_than_the_context_is_named() -> None:
    with pytest.raises(BadInput, match="a KV cache of 3 blocks"):
        Scheduler(limits(num_blocks=3)).submit(sequence(1, [1] * 12, 1))


@pytest.mark.parametrize(
    "changes", [{"max_step_tokens": 4}, {"max_step_logits": 3}, {"num_blocks": 0}, {"context_tokens": 0}, {"max_sequences": 0}]
)
def test_limits_that_cannot_work_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(BadInput):
        limits(**changes)


class AnyOrder(RuleBasedStateMachine):
    """Submit, step and cancel in any order; tokens of two values, so that prefixes are shared all the time."""

    @initialize(
        num_blocks=st.integers(3, 14),
        max_sequences=st.integers(1, 5),
        step_tokens=st.integers(1, 9),
        logits=st.integers(0, 4),
        block_tokens=st.integers(1, 4),
    )
    def begin(self, num_blocks: int, max_sequences: int, step_tokens: int, logits: int, block_tokens: int) -> None:
        self.scheduler = Scheduler(
            limits(
                num_blocks=num_blocks, block_tokens=block_tokens, context_tokens=32, max_sequences=max_sequences,
                max_step_tokens=max_sequences + step_tokens, max_step_logits=max_sequences + logits,
            )
        )  # fmt: skip
        self.cache = SimulatedCache(num_blocks, block_tokens)
        self.live: dict[int, Sequence] = {}
        self.count = 0

    @rule(
        tokens=st.integers(1, 20).map(lambda count: [0] * count) | st.lists(st.integers(0, 1), min_size=1, max_size=20),
        max_tokens=st.integers(0, 12),
        scored_from=st.none() | st.integers(0, 20),
        salt=st.sampled_from(["", "", "", "salt"]),
        priority=st.sampled_from([0, 0, 0, -2, 1]),
    )
    def submit(self, tokens: list[int], max_tokens: int, scored_from: int | None, salt: str, priority: int) -> None:
        self.count += 1
        new = sequence(
            self.count, tokens, max_tokens, scored_from=scored_from, salt=salt, chain=salt, priority=priority,
            stop_token_ids=frozenset({9}),
        )  # fmt: skip
        if new.longest > self.scheduler.limits.longest_sequence:
            with pytest.raises(BadInput):
                self.scheduler.submit(new)
        else:
            self.scheduler.submit(new)
            self.live[new.id] = new

    @rule(tokens=st.lists(st.sampled_from([0, 1, 0, 1, 9]), min_size=5, max_size=5))
    def step(self, tokens: list[int]) -> None:
        had_work = self.scheduler.has_work
        batch = self.scheduler.schedule()
        assert bool(batch.chunks) == had_work, "a step with work to do does some"
        check_budget(batch, self.scheduler)
        check_accounts(self.scheduler)
        self.check_decodes_are_served(batch)
        self.cache.compute(batch)
        self.scheduler.computed(batch)
        for chunk, token in zip(batch.chunks, tokens, strict=False):
            if chunk.is_sampled and (chunk.sequence.max_tokens == 0 or self.scheduler.append(chunk.sequence, token)):
                self.end(chunk.sequence)

    def check_decodes_are_served(self, batch: ScheduledBatch) -> None:
        served = {chunk.sequence.id for chunk in batch.chunks}
        assert all(found.id in served for found in self.scheduler.running if found.num_output)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.end(self.live[data.draw(st.sampled_from(sorted(self.live)))])

    def end(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        del self.live[sequence.id]

    @invariant()
    def accounts_balance(self) -> None:
        if hasattr(self, "scheduler"):
            check_accounts(self.scheduler)
            assert {found.id for found in [*self.scheduler.running, *self.scheduler.waiting]} == set(self.live)

    def teardown(self) -> None:
        """Whatever happened before, all that is left finishes, and no block is lost."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(1_000):
            if not self.scheduler.has_work:
                break
            self.step([0, 1, 0, 1, 0])
        assert not self.live
        assert self.scheduler.pool.num_free == self.scheduler.limits.num_blocks


AnyOrder.TestCase.settings = settings(stateful_step_count=50, deadline=None)
TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.pytestmark = [pytest.mark.pure]


def test_ten_thousand_requests_leak_nothing() -> None:
    chance = random.Random(0)
    scheduler = Scheduler(limits(num_blocks=40, max_sequences=8, max_step_tokens=64, max_step_logits=16))
    live: dict[int, Sequence] = {}
    submitted = finished = cancelled = 0
    while submitted < 10_000 or live:
        while submitted < 10_000 and len(live) < 16:
            submitted += 1
            tokens = [chance.randrange(3) for _ in range(chance.randrange(1, 40))]
            live[submitted] = sequence(submitted, tokens, chance.randrange(1, 24))
            scheduler.submit(live[submitted])
        if chance.random() < 0.1:
            cancelled += 1
            scheduler.remove(live.pop(chance.choice(list(live))))
        batch = scheduler.schedule()
        scheduler.computed(batch)
        for chunk in batch.chunks:
            if chunk.is_sampled and scheduler.append(chunk.sequence, chance.randrange(3)):
                finished += 1
                scheduler.remove(live.pop(chunk.sequence.id))
    check_accounts(scheduler)
    assert finished + cancelled == 10_000
    assert cancelled > 500
    assert scheduler.num_preemptions > 100
    assert scheduler.prefix_hit_tokens > 0
    assert scheduler.pool.num_free == 40
