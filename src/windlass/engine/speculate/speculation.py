"""Which drafts each step verifies, and what is learned from it: the state around control.py. Knows no logits and no kernels.

Drafts come from n-gram lookup, or from a model (model.py) where lookup finds nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from windlass.engine.schedule.scheduler import Chunk, ScheduledBatch
from windlass.engine.schedule.sequence import Sequence as EngineSequence
from windlass.engine.speculate.control import Control, after_step, counts, with_verdict
from windlass.engine.speculate.ngram import NgramIndex

NGRAM, MODEL, PLAIN = "ngram", "model", "plain"
MAX_DRAFTS = {NGRAM: 8, MODEL: 4}
"""Of one sequence in one step. A model's later drafts are made from its own guesses, and rarely accepted."""


class DraftingModel(Protocol):
    def follow(self, chunks: Sequence[Chunk], rows: Sequence[int]) -> None:
        """The main model computed these chunks, whose rows begin at `rows` of the step: keeps up with them."""
        ...

    def draft(self, wanted: Sequence[tuple[EngineSequence, int]]) -> list[tuple[int, ...]]:
        """Up to so many tokens that follow each sequence, all of whose tokens but the last were followed. Right after `follow`."""
        ...

    def followed(self, sequence: EngineSequence) -> None:
        """It was followed without: the device did it in the same step."""
        ...

    def can_follow(self, chunk: Chunk) -> bool:
        """Whether it has followed the sequence up to this chunk. It never drafts for a sequence that it has not."""
        ...

    def forget(self, number: int) -> None: ...


@dataclass(slots=True)
class SequenceDrafts:
    """What is kept of a sequence."""

    index: NgramIndex = field(default_factory=NgramIndex)
    rates: dict[str, float] = field(default_factory=dict[str, float])
    model_drafts: tuple[int, ...] = ()
    source: str = ""
    """Of the drafts in the current step."""


class Speculation:
    def __init__(
        self,
        *,
        auto: bool,
        ngram: bool,
        model: DraftingModel | None = None,
        max_drafts: int | None = None,
        model_drafts: int = MAX_DRAFTS[MODEL],
        drafts_in_step: bool = False,
        described: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`drafts_in_step`: the device drafts in the step that verifies, whose time then has all there is. `described`: for Info."""
        self.described, self._drafts_in_step = described, drafts_in_step
        self._ngram, self.model, self._clock = ngram, model, clock
        self.max_drafts = max_drafts or max(MAX_DRAFTS[NGRAM] if ngram else 0, MAX_DRAFTS[MODEL] if model else 0)
        self._initial = {
            source: Control(auto=auto, max_drafts=min(self.max_drafts, most))
            for source, most, is_used in ((NGRAM, MAX_DRAFTS[NGRAM], ngram), (MODEL, model_drafts, model is not None))
            if is_used
        }
        self.controls = dict(self._initial)
        self._draft_seconds = 0.0
        self._made: dict[int, Sequence[int]] = {}
        """Drafts after each row of the step, by sequence, where the device has made them already."""
        self._of: dict[int, SequenceDrafts] = {}
        self._offered: set[str] = set()
        self._has_waiting = False
        """Whether there are drafts that a step under way keeps from being verified."""
        self.num_drafted = self.num_accepted = 0

    def reset(self) -> None:
        """Forgets what was measured, while kernels were compiled and graphs captured."""
        self.controls, self._draft_seconds = dict(self._initial), 0.0
        self.num_drafted = self.num_accepted = 0

    def propose(self, running: Iterable[EngineSequence], under_way: str = "") -> None:
        """Gives the decoding sequences their drafts for the next step. `under_way`: that step was launched already, without drafts (PLAIN) or with
        those of the model (MODEL); what else there is waits for the step after it."""
        decoding = [sequence for sequence in running if sequence.num_pending == 1]
        self._has_waiting = False
        offers: dict[str, list[tuple[EngineSequence, SequenceDrafts, tuple[int, ...]]]] = {}
        for sequence in decoding:
            state = self._of.setdefault(sequence.id, SequenceDrafts())
            state.source, drafts = self._offer(sequence, state, under_way)
            if drafts:
                offers.setdefault(state.source, []).append((sequence, state, drafts))
        self._offered = set() if under_way == PLAIN else set(offers)
        for source, given in offers.items():
            control = self.controls[source]
            rates = [state.rates.get(source, control.rate) for _, state, _ in given]
            seconds = self._draft_seconds if source == MODEL and not self._drafts_in_step else 0.0
            for (sequence, _, drafts), count in zip(given, counts(control, rates, len(decoding), seconds), strict=True):
                sequence.drafts = () if under_way == PLAIN else drafts[:count]
                self._has_waiting |= under_way == PLAIN and count > 0

    def _offer(self, sequence: EngineSequence, state: SequenceDrafts, under_way: str) -> tuple[str, tuple[int, ...]]:
        """Of lookup and the model, what is accepted more often; of equals lookup, which has more drafts."""
        drafts, state.model_drafts = state.model_drafts, ()
        found = state.index.draft(sequence.tokens, self.controls[NGRAM].max_drafts) if self._ngram else ()
        rates = {source: state.rates.get(source, control.rate) for source, control in self.controls.items()}
        if found and (not drafts or rates[NGRAM] >= rates[MODEL]):
            if not (drafts and under_way == MODEL):
                return NGRAM, found
            self._has_waiting = True
        return (MODEL, drafts) if drafts else ("", ())

    def observe(self, batch: ScheduledBatch, seconds: float) -> None:
        """The step is done, and its tokens are appended: learns from it, and lets the model draft."""
        self._learn(batch, seconds)
        if self.model is not None:
            self._let_draft(self.model, batch)

    def take_drafts(self, chunks: Sequence[Chunk], drafts: Sequence[Sequence[int]]) -> None:
        """The device has made the draft that follows each row of these chunks, and kept up with them; empty: it has not."""
        self._made = {chunk.sequence.id: made for chunk, made in zip(chunks, drafts, strict=True)} if drafts else {}

    def forget(self, sequence: EngineSequence) -> None:
        self._of.pop(sequence.id, None)
        if self.model is not None:
            self.model.forget(sequence.id)

    @property
    def drafts_from_model(self) -> bool:
        """Whether the model's drafts pay, or may."""
        control = self.controls[MODEL]
        # One step without drafts measures what they gain, and may be followed by drafts again.
        return not control.auto or control.idle_steps <= 1 or control.idle_steps >= control.probe_after - 1

    @property
    def goes_on(self) -> bool:
        """Whether, after a step with the model's drafts, the next one will probably have some of them too."""
        return not self._has_waiting and not any(control.is_plain_next for control in self.controls.values())

    def is_idle(self, chunks: Sequence[Chunk]) -> bool:
        """Whether, after a step of these without drafts, the next one will probably have none: it may be launched before that step has been read. Not
        where a model follows the step, which needs its hidden states."""
        return not self._has_waiting and not self._followable(chunks)

    def _followable(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Those that the model follows now."""
        if self.model is None or not self.drafts_from_model:
            return []
        return [chunk for chunk in chunks if self.model.can_follow(chunk)]

    # --- learning

    def _learn(self, batch: ScheduledBatch, seconds: float) -> None:
        drafted: dict[str, list[int]] = {}
        for chunk in batch.chunks:
            if chunk.drafts:
                accepted = chunk.sequence.num_computed - chunk.num_known
                self._judge(chunk, accepted)
                for source in (self._of[chunk.sequence.id].source if chunk.sequence.id in self._of else NGRAM,):
                    drafted.setdefault(source, []).extend((len(chunk.drafts), accepted))
        if any(chunk.num_known - chunk.start != 1 for chunk in batch.chunks):
            return  # a prompt was read: says nothing about decoding
        rows, sequences = sum(chunk.stop - chunk.start for chunk in batch.chunks), len(batch.chunks)
        for source, control in self.controls.items():
            if drafted and source not in drafted:
                continue
            made, right = (sum(drafted.get(source, ())[place::2]) for place in (0, 1))
            self.controls[source] = after_step(
                control,
                rows=rows,
                sequences=sequences,
                seconds=seconds,
                drafted=made,
                accepted=right,
                offered=source == MODEL or source in self._offered,
            )

    def _judge(self, chunk: Chunk, accepted: int) -> None:
        self.num_drafted += len(chunk.drafts)
        self.num_accepted += accepted
        state = self._of.get(chunk.sequence.id)
        if state is None or not state.source:
            return
        control, number = self.controls[state.source], len(chunk.drafts)
        state.rates[state.source] = with_verdict(state.rates.get(state.source, control.rate), number, accepted)
        rate = control.rate + (with_verdict(control.rate, number, accepted) - control.rate) / 2
        self.controls[state.source] = msgspec.structs.replace(control, rate=rate)

    # --- the model's drafts

    def _let_draft(self, model: DraftingModel, batch: ScheduledBatch) -> None:
        began = self._clock()
        rows, chunks, starts = 0, list[Chunk](), list[int]()
        followed = [] if self._made else self._followable(batch.chunks)
        made, self._made = self._made, {}
        for chunk in batch.chunks if made else ():
            if chunk.sequence.blocks and model.can_follow(chunk):
                accepted = chunk.sequence.num_computed - chunk.num_known
                # A prompt of one token looks like a decoding sequence, and nothing was proposed for it.
                state = self._of.setdefault(chunk.sequence.id, SequenceDrafts())
                state.model_drafts = (made[chunk.sequence.id][accepted],)
                model.followed(chunk.sequence)
        if not followed:
            return
        for chunk in batch.chunks:
            if chunk.sequence.blocks and chunk in followed:
                chunks.append(chunk)
                starts.append(rows)
            rows += chunk.stop - chunk.start
        if not chunks:
            return
        model.follow(chunks, starts)
        wanted = [chunk.sequence for chunk in chunks if chunk.sequence.num_pending == 1]
        if not wanted:
            return
        control = self.controls[MODEL]
        states = [self._of.setdefault(sequence.id, SequenceDrafts()) for sequence in wanted]
        rates = [state.rates.get(MODEL, control.rate) for state in states]
        chosen = [max(count, 1) for count in counts(control, rates, len(wanted), self._draft_seconds)]
        for state, drafts in zip(states, model.draft(list(zip(wanted, chosen, strict=True))), strict=True):
            state.model_drafts = drafts
        if all(chunk.num_known - chunk.start == 1 for chunk in chunks):
            taken = (self._clock() - began) / max(chosen)
            self._draft_seconds += (taken - self._draft_seconds) * (0.15 if self._draft_seconds else 1)
