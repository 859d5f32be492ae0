"""Drafts in the schedule: they take what nobody else needs, and whatever is accepted, the accounts balance."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_cache import check_accounts

from windlass.runtime.engine.schedule.scheduler import Scheduler, SchedulerLimits
from windlass.runtime.engine.schedule.sequence import Sequence

pytestmark = pytest.mark.pure


@given(
    st.integers(4, 12), st.integers(1, 4), st.integers(1, 12), st.integers(0, 10), st.integers(1, 4), st.integers(0, 2**32),
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 14)), min_size=1, max_size=8),
)  # fmt: skip
def test_whatever_is_drafted_and_accepted(
    num_blocks: int, sequences: int, tokens: int, logits: int, drafts: int, seed: int, asked: list[tuple[int, int]]
) -> None:
    limits = SchedulerLimits(
        num_blocks=num_blocks, context_tokens=32, block_tokens=4, max_sequences=sequences, max_step_tokens=sequences + tokens,
        max_step_logits=sequences + logits, max_drafts=drafts,
    )  # fmt: skip
    scheduler, chance = Scheduler(limits), random.Random(seed)
    live = 0
    for number, (length, count) in enumerate(asked):
        if length + count <= limits.longest_sequence:
            scheduler.submit(Sequence(id=number, tokens=[1] * length, num_prompt=length, max_tokens=count))
            live += 1
    for _ in range(2_000):
        if not scheduler.has_work:
            break
        for sequence in scheduler.running:
            if sequence.num_pending == 1:
                sequence.drafts = tuple(chance.randrange(3) for _ in range(chance.randrange(7)))
        decoding = {sequence.id for sequence in scheduler.running if sequence.num_pending == 1}
        batch = scheduler.schedule()
        assert sum(chunk.stop - chunk.start for chunk in batch.chunks) <= limits.max_step_tokens
        assert sum(chunk.num_logits for chunk in batch.chunks) <= limits.max_step_logits
        served = {chunk.sequence.id for chunk in batch.chunks} | {sequence.id for sequence in batch.preempted}
        assert decoding <= served, "a draft delayed a decode"
        for chunk in batch.chunks:
            sequence = chunk.sequence
            assert chunk.stop <= len(sequence.blocks) * 4
            assert len(chunk.drafts) <= drafts and not sequence.drafts
            assert not chunk.drafts or (chunk.is_sampled and sequence.num_output + len(chunk.drafts) + 1 <= sequence.max_tokens)
        check_accounts(scheduler)
        sampled = [chunk for chunk in batch.chunks if chunk.is_sampled]
        scheduler.computed(batch)
        for chunk in sampled:
            accepted = chance.randrange(len(chunk.drafts) + 1)
            answer = [(draft, True) for draft in chunk.drafts[:accepted]] + [(5, False)]
            for token, is_computed in answer:
                if scheduler.append(chunk.sequence, token, is_computed=is_computed):
                    scheduler.remove(chunk.sequence)
                    live -= 1
                    break
            else:
                assert chunk.sequence.num_pending == 1
        check_accounts(scheduler)
    assert not scheduler.has_work and not live
    assert scheduler.pool.num_free == num_blocks
