"""Continuous batching with chunked prefill: which tokens of which sequences the next step computes. Pure: no torch, no clock.

Every step first schedules one token of each decoding sequence, so that no answer stalls while a prompt is prefilled; what is left of the
token budget goes to prompts, oldest first, in chunks where they are long. The order of admission is that of queue.py. A sequence is
admitted when enough blocks for all its tokens are free, and allocates them at once. When a growing sequence finds no free block, the
least urgent one is preempted, of several the youngest: it loses its blocks, waits again and recomputes what is no longer in the prefix
cache. The oldest of the most urgent is never preempted and every sequence fits alone, so all of them finish.

Priorities: the sequence that is next in the queue preempts running ones that are less urgent, if that gives it the room it lacks: a place
in the batch, or blocks. A sequence yields so at most `MAX_YIELDS` times, so that it finishes whatever arrives.

Drafts (runtime/engine/speculate) are verified in the same step as the token they follow, as further rows of its sequence. They take what decoding
sequences leave of the budgets, and blocks that nobody needs now: a draft preempts nobody and delays no decode. `append` counts a draft that
was accepted as computed; a rejected one leaves nothing but blocks that the sequence will need soon.

`running` is in order of admission, oldest first. With one owner that is the order of arrival, and every running sequence is older than
every waiting one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from windlass.core.constants import BLOCK_TOKENS
from windlass.core.model import Frozen
from windlass.core.request import FinishReason
from windlass.errors import BadInput, TooLong
from windlass.runtime.engine.schedule.blocks import BlockPool, PrefixMatch
from windlass.runtime.engine.schedule.queue import WaitingQueue
from windlass.runtime.engine.schedule.sequence import Sequence

MAX_YIELDS = 2
"""Times that a sequence is preempted for a more urgent one: its tokens are computed again at most so often."""


class SchedulerLimits(Frozen):
    num_blocks: int
    context_tokens: int
    """Maximum length of a sequence, prompt and output."""
    block_tokens: int = BLOCK_TOKENS
    max_sequences: int = 32
    """In one step."""
    max_step_tokens: int = 512
    max_step_logits: int = 128
    """Rows of logits in one step: one per sampled token, one per scored prompt token."""
    lookahead: bool = False
    """Allocate blocks two tokens ahead for decoding sequences while blocks are free: the device launches steps ahead of the host."""
    max_drafts: int = 0
    """Tokens of one sequence that a step verifies beyond the one it decodes. Blocks are allocated twice as far ahead while they are free:
    a model that drafts writes its own keys and values there."""

    def __post_init__(self) -> None:
        if min(self.num_blocks, self.context_tokens, self.block_tokens, self.max_sequences) < 1:
            raise BadInput("an engine needs at least one block of at least one token, one sequence, and a context of one token")
        if self.max_step_tokens <= self.max_sequences:
            raise BadInput(
                f"max_step_tokens is {self.max_step_tokens}, which leaves no prefill budget while {self.max_sequences} sequences decode; "
                f"raise max_step_tokens above {self.max_sequences} or lower max_sequences"
            )
        if self.max_step_logits < self.max_sequences:
            raise BadInput(f"max_step_logits is {self.max_step_logits}; it must be at least max_sequences ({self.max_sequences})")

    @property
    def longest_sequence(self) -> int:
        """The smaller of the model's context and the KV cache."""
        return min(self.context_tokens, self.num_blocks * self.block_tokens)

    @property
    def max_decode_rows(self) -> int:
        """In a step without prompts."""
        return self.max_step_logits if self.max_drafts else self.max_sequences

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
    """The first token whose logits are needed; they are needed for all from there on."""
    drafts: tuple[int, ...] = ()
    """The last of them are guesses, beyond the tokens of the sequence."""

    @property
    def num_logits(self) -> int:
        return self.stop - self.logits_from

    @property
    def num_known(self) -> int:
        """Where its drafts begin."""
        return self.stop - len(self.drafts)

    @property
    def is_sampled(self) -> bool:
        """Whether it holds the sequence's last token, so that the next one is sampled."""
        return self.num_known == len(self.sequence.tokens)

    @property
    def tokens(self) -> list[int]:
        return [*self.sequence.tokens[self.start : self.num_known], *self.drafts]


@dataclass(slots=True)
class ScheduledBatch:
    chunks: list[Chunk]
    preempted: list[Sequence] = field(default_factory=list[Sequence])


def chunk_of(sequence: Sequence, tokens_left: int, logits_left: int) -> Chunk:
    """As much of a sequence as the budgets (both at least one) allow."""
    start, end = sequence.num_computed, len(sequence.tokens)
    first_scored = sequence.num_scored - 1 if sequence.num_scored < sequence.num_prompt else end
    first_scored = max(start, first_scored)
    stop = min(end, start + tokens_left, first_scored + logits_left)
    return Chunk(sequence, start, stop, min(first_scored, stop - 1 if stop == end else stop))


_priority = attrgetter("priority")


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

    # --- sequences

    def submit(self, sequence: Sequence) -> None:
        """Rejects a sequence that could never finish."""
        longest = self.limits.longest_sequence
        if not sequence.num_prompt:
            raise BadInput("the prompt is empty; it needs at least one token", field="prompt")
        if sequence.longest > longest:
            raise TooLong(
                f"prompt of {sequence.num_prompt:,} tokens plus max_tokens {sequence.max_tokens:,} does not fit in "
                f"{longest:,} tokens ({self._why(longest)}); shorten the prompt or lower max_tokens",
                field="prompt",
            )
        if sequence.num_output and sequence.num_output >= sequence.max_tokens:
            raise TooLong(
                f"prompt of {sequence.num_prompt:,} tokens and {sequence.num_output:,} generated so far do not fit in {longest:,} tokens "
                f"({self._why(longest)}), less than when the request started; retry with a shorter prompt",
                field="prompt",
            )
        sequence.arrival = self._arrivals = self._arrivals + 1
        sequence.num_scored = self._unscored(sequence)
        self.waiting.add(sequence)

    def _why(self, longest: int) -> str:
        return "the context" if longest == self.limits.context_tokens else f"a KV cache of {self.limits.num_blocks:,} blocks"

    @staticmethod
    def _unscored(sequence: Sequence) -> int:
        """The first token is never scored: nothing precedes it."""
        if sequence.scored_from is None:
            return sequence.num_prompt
        return min(max(sequence.scored_from, 1), sequence.num_prompt)

    def remove(self, sequence: Sequence) -> None:
        """Finished or cancelled, whether it waits or runs."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self.waiting.remove(sequence)
        self.waiting.finish(sequence)

    def append(self, sequence: Sequence, token: int, *, is_computed: bool = False) -> FinishReason | None:
        """A token was sampled. The caller removes a sequence that is finished. `is_computed`: it is the draft that the last step computed."""
        sequence.tokens.append(token)
        if is_computed:
            sequence.num_computed += 1
            self._register(sequence)
        self.waiting.charge(sequence, 1)
        if token in sequence.stop_token_ids:
            return "stop"
        return "length" if sequence.num_output >= sequence.max_tokens else None

    # --- a step

    def schedule(self) -> ScheduledBatch:
        """What the next step computes. `computed` must follow before the next call."""
        batch = ScheduledBatch([])
        self._yield_to_urgent(batch)
        self._add_decodes(batch)
        self._add_drafts(batch)
        tokens_left = self.limits.max_step_tokens - sum(chunk.stop - chunk.start for chunk in batch.chunks)
        logits_left = self.limits.max_step_logits - sum(chunk.num_logits for chunk in batch.chunks)
        for sequence in self._prompts(batch):
            chunk = chunk_of(sequence, tokens_left, logits_left)
            batch.chunks.append(chunk)
            tokens_left -= chunk.stop - chunk.start
            logits_left -= chunk.num_logits
            if not tokens_left or not logits_left:
                break
        return batch

    def computed(self, batch: ScheduledBatch) -> None:
        """The batch's tokens are in the KV cache: full blocks enter the prefix cache. Drafts do not count before they are accepted."""
        for chunk in batch.chunks:
            sequence = chunk.sequence
            sequence.num_computed = chunk.num_known
            sequence.num_scored = max(sequence.num_scored, min(chunk.num_known + 1, sequence.num_prompt))
            self._register(sequence)

    def _register(self, sequence: Sequence) -> None:
        size = self.limits.block_tokens
        while (sequence.num_registered + 1) * size <= sequence.num_computed:
            first = sequence.num_registered * size
            block, tokens = sequence.blocks[sequence.num_registered], tuple(sequence.tokens[first : first + size])
            sequence.chain = self.pool.cache(block, sequence.chain, tokens)
            sequence.num_registered += 1

    # --- priorities

    def _yield_to_urgent(self, batch: ScheduledBatch) -> None:
        """Before anything is scheduled: admits the next waiting sequence if a less urgent one runs, in its place if there is no other."""
        if not self.waiting or not self.running:
            return
        urgent = self.waiting.next
        less_urgent = [one for one in reversed(self._by_urgency()) if one.priority > urgent.priority]
        yielding = [one for one in less_urgent if one.num_yields < MAX_YIELDS]
        count = self._num_to_preempt(urgent, yielding) if less_urgent else None
        if count is None:
            return
        for sequence in yielding[:count]:
            sequence.num_yields += 1
            self._preempt(sequence)
            batch.preempted.append(sequence)
        is_admitted = self._admit(urgent)
        assert is_admitted, "a sequence was preempted in vain"

    def _by_urgency(self) -> list[Sequence]:
        """Running sequences, most urgent first, of equals the oldest. They are preempted from its end."""
        return sorted(self.running, key=_priority)

    def _num_to_preempt(self, urgent: Sequence, yielding: list[Sequence]) -> int | None:
        """How many of them, in their order, make room for another; None: even all are too few."""
        match = self._match(urgent).blocks
        left = self.pool.num_free - self.pool.num_unreferenced(match) - self.pool.blocks_for(len(urgent.tokens)) + len(match)
        released = Counter[int]()
        for count in range(len(yielding) + 1):
            num_kept = len(self.running) - count
            if num_kept < self.limits.max_sequences and left >= num_kept:
                return count
            for block in yielding[count].blocks if count < len(yielding) else ():
                released[block] += 1
                left += released[block] == self.pool.ref_count(block) and block not in match
        return None

    def _add_decodes(self, batch: ScheduledBatch) -> None:
        """Most urgent first: whoever is preempted for another has not been scheduled yet."""
        size = self.limits.block_tokens
        for sequence in self._by_urgency():
            if sequence.num_pending != 1 or not sequence.blocks:  # in prefill, or just preempted
                continue
            end = len(sequence.tokens)
            if end > len(sequence.blocks) * size and not self._grow(sequence, batch):
                continue
            batch.chunks.append(Chunk(sequence, end - 1, end, end - 1))
            if self.limits.lookahead and end + 1 >= len(sequence.blocks) * size:
                self._allocate_ahead(sequence)

    def _add_drafts(self, batch: ScheduledBatch) -> None:
        """After all decodes: of what they leave, one row stays for a prompt. None in a step that preempted."""
        left = min(self.limits.max_step_tokens, self.limits.max_step_logits) - 1 - len(batch.chunks)
        for chunk in batch.chunks:
            sequence = chunk.sequence
            drafts, sequence.drafts = sequence.drafts, ()
            if batch.preempted or not self.limits.max_drafts:
                continue
            self._allocate_for_drafts(sequence)
            chunk.drafts = drafts[: max(min(self._draft_room(sequence), left), 0)]
            chunk.stop += len(chunk.drafts)
            left -= len(chunk.drafts)

    def _draft_room(self, sequence: Sequence) -> int:
        """Drafts that have slots, and whose successor is still wanted: the last token of an answer is never computed."""
        slots = len(sequence.blocks) * self.limits.block_tokens - len(sequence.tokens)
        return min(self.limits.max_drafts, slots, sequence.max_tokens - sequence.num_output - 1)

    def _allocate_for_drafts(self, sequence: Sequence) -> None:
        wanted = self.pool.blocks_for(min(len(sequence.tokens) + 2 * self.limits.max_drafts, sequence.longest))
        while len(sequence.blocks) < min(wanted, self.limits.max_blocks) and self.pool.num_free > len(self.running):
            sequence.blocks.append(self.pool.allocate())

    def _grow(self, sequence: Sequence, batch: ScheduledBatch) -> bool:
        """One more block, preempting the least urgent if none is free; False: the sequence was itself that one."""
        while not self.pool.num_free:
            last = self._by_urgency()[-1]
            self._preempt(last)
            batch.preempted.append(last)
            if last is sequence:
                return False
        sequence.blocks.append(self.pool.allocate())
        return True

    def _allocate_ahead(self, sequence: Sequence) -> None:
        """Only blocks that no running sequence needs now."""
        if self.pool.num_free > len(self.running) and len(sequence.blocks) < self.limits.max_blocks:
            sequence.blocks.append(self.pool.allocate())

    def _prompts(self, batch: ScheduledBatch) -> Iterator[Sequence]:
        """Sequences in prefill, then those that can be admitted; none are admitted in a step that preempted."""
        for sequence in self.running:
            if sequence.num_pending > 1:
                yield sequence
        while self.waiting and not batch.preempted and len(self.running) < self.limits.max_sequences:
            if not self._admit(self.waiting.next):
                return
            yield self.running[-1]

    def _admit(self, sequence: Sequence) -> bool:
        """Leaves one free block for every running sequence, so that the new one is not preempted at once."""
        match = self._match(sequence)
        num_new = self.pool.blocks_for(len(sequence.tokens)) - len(match.blocks)
        if self.pool.num_free - self.pool.num_unreferenced(match.blocks) - num_new < len(self.running):
            return False
        self.pool.acquire(match.blocks)
        sequence.blocks = [*match.blocks, *(self.pool.allocate() for _ in range(num_new))]
        sequence.num_registered, sequence.chain = len(match.blocks), match.chain
        sequence.num_computed = len(match.blocks) * self.limits.block_tokens
        if sequence.num_cached < 0:
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
            self.waiting.charge(sequence, sequence.num_prompt - sequence.num_cached)
        self.prefix_query_tokens += len(sequence.tokens)
        self.prefix_hit_tokens += sequence.num_computed
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return True

    def _match(self, sequence: Sequence) -> PrefixMatch:
        """Tokens to be scored need the logits of those before them, which the prefix cache does not have."""
        if sequence.num_scored < sequence.num_prompt:
            return self.pool.match(sequence.tokens[: sequence.num_scored], sequence.salt)
        return self.pool.match(sequence.tokens, sequence.salt)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._release(sequence)
        sequence.num_computed, sequence.drafts = 0, ()
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.requeue(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_registered, sequence.chain = 0, sequence.salt
