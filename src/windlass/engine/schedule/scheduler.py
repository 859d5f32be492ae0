"""Which tokens of which sequences the next step computes. Pure: sequences, numbers of blocks and budgets; no torch, no clock.

First come, first served, among the requests of one owner; between owners, who was served least (waiting.py).

Every step first gives each decoding sequence its token, so that nobody's answer stands still while somebody
else's prompt is read; what is left of the budget goes to prompts, oldest first, cut into chunks where they are long. A sequence is
admitted when the blocks of all its tokens are free, and takes them at once. When a growing sequence finds no free block, the youngest
one loses its own and waits again; it will compute its tokens anew, as far as they are no longer kept. Since the oldest is never made
to wait, and every sequence fits alone, all of them finish.

`running` is in order of admission: the oldest is who has run for longest. With one owner that is the order of arrival, and every running
sequence is older than every waiting one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from windlass.core.model import Frozen
from windlass.core.request import FinishReason
from windlass.engine.schedule.blocks import BlockPool, PrefixMatch
from windlass.engine.schedule.queue import WaitingQueue
from windlass.engine.schedule.sequence import Sequence
from windlass.errors import BadInput, TooLong


class SchedulerLimits(Frozen):
    num_blocks: int
    context_tokens: int
    """Of one sequence: prompt and output."""
    block_tokens: int = 16
    max_sequences: int = 32
    """In one step."""
    max_step_tokens: int = 512
    max_step_logits: int = 128
    """Rows of logits in one step: a sampled token needs one, a scored prompt one for each of its tokens."""
    room_ahead: bool = False
    """Decoding sequences have room for two tokens more, where there are blocks: a device may begin a step before it is asked to, and prepare
    another."""

    def __post_init__(self) -> None:
        if min(self.num_blocks, self.context_tokens, self.block_tokens, self.max_sequences) < 1:
            raise BadInput("an engine needs at least one block of at least one token, one sequence, and a context of one token")
        if self.max_step_tokens <= self.max_sequences:
            raise BadInput(
                f"{self.max_step_tokens} tokens a step leave nothing for prompts while {self.max_sequences} sequences decode; "
                f"raise max_step_tokens above {self.max_sequences} or lower max_sequences"
            )
        if self.max_step_logits < self.max_sequences:
            raise BadInput(f"max_step_logits is {self.max_step_logits}; it must be at least max_sequences ({self.max_sequences})")

    @property
    def longest_sequence(self) -> int:
        """What both the model's context and the cache have room for."""
        return min(self.context_tokens, self.num_blocks * self.block_tokens)

    @property
    def max_blocks(self) -> int:
        """Of one sequence."""
        return -(-self.longest_sequence // self.block_tokens)


@dataclass(slots=True)
class Chunk:
    """Tokens start..stop of a sequence, to be computed in one step."""

    sequence: Sequence
    start: int
    stop: int
    logits_from: int
    """The first token whose logits are wanted; from there on they are wanted for all of the chunk."""

    @property
    def num_logits(self) -> int:
        return self.stop - self.logits_from

    @property
    def is_sampled(self) -> bool:
        """Whether it ends with the sequence's last token, so that the next one is drawn."""
        return self.stop == len(self.sequence.tokens)


@dataclass(slots=True)
class ScheduledBatch:
    chunks: list[Chunk]
    preempted: list[Sequence] = field(default_factory=list[Sequence])


def chunk_of(sequence: Sequence, tokens_left: int, logits_left: int) -> Chunk:
    """As much of a sequence as the budgets, both at least one, allow."""
    start, end = sequence.num_computed, len(sequence.tokens)
    first_scored = sequence.num_scored - 1 if sequence.num_scored < sequence.num_prompt else end
    first_scored = max(start, first_scored)
    stop = min(end, start + tokens_left, first_scored + logits_left)
    return Chunk(sequence, start, stop, min(first_scored, stop - 1 if stop == end else stop))


class Scheduler:
    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks, limits.block_tokens)
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    # --- sequences come and go

    def submit(self, sequence: Sequence) -> None:
        """Refuses what could never finish."""
        longest = self.limits.longest_sequence
        if not sequence.num_prompt:
            raise BadInput("the prompt is empty; it needs at least one token", field="prompt")
        if sequence.longest > longest:
            raise TooLong(
                f"prompt of {sequence.num_prompt:,} tokens and {sequence.max_tokens:,} new ones do not fit in "
                f"{longest:,} tokens ({self._why(longest)}); shorten the prompt or lower max_tokens",
                field="prompt",
            )
        if sequence.num_output and sequence.num_output >= sequence.max_tokens:
            raise TooLong(
                f"prompt of {sequence.num_prompt:,} tokens and {sequence.num_output:,} of its answer leave no room in {longest:,} tokens "
                f"({self._why(longest)}), which is less than there was when it began; ask again with a shorter prompt",
                field="prompt",
            )
        sequence.arrival = self._arrivals = self._arrivals + 1
        sequence.num_scored = self._unscored(sequence)
        self.waiting.enter(sequence)

    def _why(self, longest: int) -> str:
        return "the context" if longest == self.limits.context_tokens else f"a cache of {self.limits.num_blocks:,} blocks"

    @staticmethod
    def _unscored(sequence: Sequence) -> int:
        """Nothing is known of the first token, which nothing precedes."""
        if sequence.scored_from is None:
            return sequence.num_prompt
        return min(max(sequence.scored_from, 1), sequence.num_prompt)

    def remove(self, sequence: Sequence) -> None:
        """Finished or cancelled, wherever it is."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)
        self.waiting.leave(sequence)

    def append(self, sequence: Sequence, token: int) -> FinishReason | None:
        """A token was drawn. The caller removes a sequence that is finished."""
        sequence.tokens.append(token)
        self.waiting.serve(sequence.owner, 1)
        if token in sequence.stop_token_ids:
            return "stop"
        return "length" if sequence.num_output >= sequence.max_tokens else None

    # --- a step

    def schedule(self) -> ScheduledBatch:
        """What the next step computes. `computed` must follow before the next call."""
        batch = ScheduledBatch([])
        self._add_decodes(batch)
        tokens_left = self.limits.max_step_tokens - len(batch.chunks)
        logits_left = self.limits.max_step_logits - len(batch.chunks)
        for sequence in self._prompts(batch):
            chunk = chunk_of(sequence, tokens_left, logits_left)
            batch.chunks.append(chunk)
            tokens_left -= chunk.stop - chunk.start
            logits_left -= chunk.num_logits
            if not tokens_left or not logits_left:
                break
        return batch

    def computed(self, batch: ScheduledBatch) -> None:
        """The batch's tokens are in the cache: full blocks become findable."""
        size = self.limits.block_tokens
        for chunk in batch.chunks:
            sequence = chunk.sequence
            sequence.num_computed = chunk.stop
            sequence.num_scored = max(sequence.num_scored, min(chunk.stop + 1, sequence.num_prompt))
            while (sequence.num_kept + 1) * size <= chunk.stop:
                first = sequence.num_kept * size
                block, tokens = sequence.blocks[sequence.num_kept], tuple(sequence.tokens[first : first + size])
                sequence.chain = self.pool.keep(block, sequence.chain, tokens)
                sequence.num_kept += 1

    def _add_decodes(self, batch: ScheduledBatch) -> None:
        size = self.limits.block_tokens
        for sequence in list(self.running):
            if sequence.num_pending != 1 or not sequence.blocks:  # a prompt, or it has just been preempted
                continue
            end = len(sequence.tokens)
            if end > len(sequence.blocks) * size and not self._grow(sequence, batch):
                continue
            batch.chunks.append(Chunk(sequence, end - 1, end, end - 1))
            if self.limits.room_ahead and end + 1 >= len(sequence.blocks) * size:
                self._grow_ahead(sequence)

    def _grow(self, sequence: Sequence, batch: ScheduledBatch) -> bool:
        """One more block, if need be from the youngest; False: it is itself the youngest."""
        while not self.pool.num_free:
            youngest = self.running[-1]
            self._preempt(youngest)
            batch.preempted.append(youngest)
            if youngest is sequence:
                return False
        sequence.blocks.append(self.pool.take())
        return True

    def _grow_ahead(self, sequence: Sequence) -> None:
        """Only what nobody needs now."""
        if self.pool.num_free > len(self.running) and len(sequence.blocks) < self.limits.max_blocks:
            sequence.blocks.append(self.pool.take())

    def _prompts(self, batch: ScheduledBatch) -> Iterator[Sequence]:
        """Those being read, then those that can be admitted: not in a step that had to take blocks away."""
        for sequence in self.running:
            if sequence.num_pending > 1:
                yield sequence
        while self.waiting and not batch.preempted and len(self.running) < self.limits.max_sequences:
            if not self._admit(self.waiting.first):
                return
            yield self.running[-1]

    def _admit(self, sequence: Sequence) -> bool:
        """Leaves every running sequence one block to grow into, lest the newcomer be thrown out at once."""
        match = self._match(sequence)
        num_new = self.pool.blocks_for(len(sequence.tokens)) - len(match.blocks)
        if self.pool.num_free - self.pool.num_unheld(match.blocks) - num_new < len(self.running):
            return False
        self.pool.hold(match.blocks)
        sequence.blocks = [*match.blocks, *(self.pool.take() for _ in range(num_new))]
        sequence.num_kept, sequence.chain = len(match.blocks), match.chain
        sequence.num_computed = len(match.blocks) * self.limits.block_tokens
        if sequence.num_cached < 0:
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
            self.waiting.serve(sequence.owner, sequence.num_prompt - sequence.num_cached)
        self.prefix_query_tokens += len(sequence.tokens)
        self.prefix_hit_tokens += sequence.num_computed
        self.waiting.take(sequence)
        self.running.append(sequence)
        return True

    def _match(self, sequence: Sequence) -> PrefixMatch:
        """Where prompt tokens are to be scored, the logits of those before them have to be computed."""
        if sequence.num_scored < sequence.num_prompt:
            return self.pool.match(sequence.tokens[: sequence.num_scored], sequence.salt)
        return self.pool.match(sequence.tokens, sequence.salt)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_computed = 0
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.put_back(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_kept, sequence.chain = 0, sequence.salt
