"""A cache that remembers in every slot for which prefix it was written, so that a wrong block shows at once. No torch."""

from __future__ import annotations

from windlass.runtime.engine.schedule.scheduler import ScheduledBatch, Scheduler
from windlass.runtime.engine.schedule.sequence import Sequence


class SimulatedCache:
    def __init__(self, num_blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.slots: list[object] = [None] * (num_blocks * block_tokens)

    def compute(self, batch: ScheduledBatch) -> None:
        for chunk in batch.chunks:
            prefixes = prefix_marks(chunk.sequence)
            for position in range(chunk.start, chunk.stop):
                self.slots[self.slot(chunk.sequence, position)] = prefixes[position]
        for chunk in batch.chunks:  # what a sequence attends to, after everybody has written
            self.check(chunk.sequence, chunk.stop)

    def check(self, sequence: Sequence, num_tokens: int) -> None:
        prefixes = prefix_marks(sequence)
        for position in range(num_tokens):
            found = self.slots[self.slot(sequence, position)]
            assert found == prefixes[position], f"sequence {sequence.id} finds another's token at {position}"

    def slot(self, sequence: Sequence, position: int) -> int:
        return sequence.blocks[position // self.block_tokens] * self.block_tokens + position % self.block_tokens


def prefix_marks(sequence: Sequence) -> list[int]:
    marks: list[int] = []
    mark = hash(sequence.salt)
    for token in sequence.tokens:
        mark = hash((mark, token))
        marks.append(mark)
    return marks


def check_accounts(scheduler: Scheduler) -> None:
    """Holders are exactly the sequences that list a block; free and held blocks together are all; the orders hold."""
    pool = scheduler.pool
    holders = [0] * pool.num_blocks
    for sequence in scheduler.running:
        assert len(set(sequence.blocks)) == len(sequence.blocks), "a block twice in one sequence"
        assert len(sequence.blocks) * pool.block_tokens >= sequence.num_computed
        for block in sequence.blocks:
            holders[block] += 1
    assert holders == [pool.ref_count(block) for block in range(pool.num_blocks)]
    assert pool.num_free == sum(1 for count in holders if not count)
    for sequence in scheduler.waiting:
        assert not sequence.blocks
        assert sequence.num_computed == 0
    everybody = [*scheduler.running, *scheduler.waiting]
    if len({(sequence.owner, sequence.priority) for sequence in everybody}) == 1:
        order = [sequence.arrival for sequence in everybody]
        assert order == sorted(order), "first come, first served"
    assert len(scheduler.running) <= scheduler.limits.max_sequences


def check_budget(batch: ScheduledBatch, scheduler: Scheduler) -> None:
    limits = scheduler.limits
    assert sum(chunk.stop - chunk.start for chunk in batch.chunks) <= limits.max_step_tokens
    assert sum(chunk.num_logits for chunk in batch.chunks) <= limits.max_step_logits
    assert len(batch.chunks) <= limits.max_sequences
    assert len({chunk.sequence.id for chunk in batch.chunks}) == len(batch.chunks)
    for chunk in batch.chunks:
        assert chunk.sequence in scheduler.running
        assert chunk.start == chunk.sequence.num_computed < chunk.stop <= len(chunk.sequence.tokens)
        assert chunk.stop <= len(chunk.sequence.blocks) * limits.block_tokens
        if chunk.is_sampled:
            assert chunk.num_logits >= 1
