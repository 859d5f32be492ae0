"""Which drafts each step verifies, and what is learned from it: the state around control.py. Knows no logits and no kernels.

Drafts come from n-gram lookup, or from a model (model.py) where lookup finds nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from windlass.runtime.engine.schedule.scheduler import Chunk, ScheduledBatch
from windlass.runtime.engine.schedule.sequence import Sequence as EngineSequence
from windlass.runtime.engine.speculate.control import (
    FOLLOWING,
    LOOKUP,
    Acceptance,
    after_step,
    as_ahead,
    begun,
    counts,
    is_measuring,
    new_control,
)
from windlass.runtime.engine.speculate.ngram import NgramIndex

NGRAM, MODEL, PLAIN = "ngram", "model", "plain"
MAX_DRAFTS = {NGRAM: 8, MODEL: 4}
"""Of one sequence in one step. A model's later drafts are made from its own guesses, and rarely accepted."""
GIVEN_UP = 2
"""Steps in a row that left out the model's drafts: it no longer follows."""


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
    accepted: dict[str, Acceptance] = field(default_factory=dict[str, Acceptance])
    model_drafts: tuple[int, ...] = ()
    source: str = ""
    """Of the drafts in the current step."""
    passed_over: tuple[int, tuple[int, ...]] = (0, ())
    """Tokens there were when lookup found these, and the model's were taken: what came says whether they were right."""


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
            source: new_control(trying, auto=auto, max_drafts=min(self.max_drafts, most))
            for source, trying, most, is_used in (
                (NGRAM, LOOKUP, MAX_DRAFTS[NGRAM], ngram),
                # What must be drafted need not be tried: only how many is asked, which what came last tells best.
                (MODEL, FOLLOWING if auto else LOOKUP, model_drafts, model is not None),
            )
            if is_used
        }
        self.controls = dict(self._initial)
        self.waiting_seconds = 0.0
        """What a step takes more if it was not launched ahead. Steps without drafts that measure what drafts gain are not, since the model follows
        them, nor are those after them; if it did not, they would be."""
        self._draft_seconds = 0.0
        self._made: dict[int, Sequence[int]] = {}
        """Drafts after each row of the step, by sequence, where the device has made them already."""
        self._of: dict[int, SequenceDrafts] = {}
        self._left_out: set[str] = set()
        """Sources whose drafts are not verified in this step, since they would not pay."""
        self._has_waiting = False
        """Whether there are drafts that a step under way keeps from being verified."""
        self.num_drafted = self.num_accepted = 0

    def reset(self) -> None:
        """Forgets what was measured, while kernels were compiled and graphs captured; not `waiting_seconds`."""
        self.controls, self._draft_seconds = dict(self._initial), 0.0
        self.num_drafted = self.num_accepted = 0

    @property
    def may_leave_model_out(self) -> bool:
        """Whether it must know what steps without drafts take."""
        return self.model is not None and self.controls[MODEL].auto

    def only_measure(self, *, followed: bool) -> None:
        """Until `reset`, steps have no drafts; the model follows them, or has given up."""
        changes = {"plain_every": 0, "idle_steps": 0 if followed else GIVEN_UP}
        self.controls = {source: msgspec.structs.replace(control, **changes) for source, control in self._initial.items()}

    def propose(self, running: Iterable[EngineSequence], under_way: str = "") -> None:
        """Gives the decoding sequences their drafts for the next step. `under_way`: that step was launched already, without drafts (PLAIN) or with
        those of the model (MODEL); what else there is waits for the step after it."""
        decoding = [sequence for sequence in running if sequence.num_pending == 1]
        self._has_waiting = False
        offers: dict[str, list[tuple[EngineSequence, SequenceDrafts, tuple[int, ...]]]] = {}
        for sequence in decoding:
            state = self._of.setdefault(sequence.id, SequenceDrafts())
            state.source, drafts = self._offer(sequence, state, len(decoding), under_way)
            if drafts:
                offers.setdefault(state.source, []).append((sequence, state, drafts))
        self._left_out = set()
        for source, given in offers.items():
            chosen = self._chosen(source, [state for _, state, _ in given], len(decoding))
            if not any(chosen) and under_way != PLAIN and not is_measuring(self.controls[source], len(decoding)):
                self._left_out.add(source)
            for (sequence, _, drafts), count in zip(given, chosen, strict=True):
                sequence.drafts = () if under_way == PLAIN else drafts[:count]
                self._has_waiting |= under_way == PLAIN and count > 0

    def _chosen(self, source: str, states: Sequence[SequenceDrafts], num_rows: int) -> tuple[int, ...]:
        if source == MODEL and self.controls[MODEL].is_due:
            self.controls[MODEL] = begun(self.controls[MODEL])
        seconds = self._draft_seconds if source == MODEL and not self._drafts_in_step else 0.0
        return counts(self.controls[source], [self._accepted(state, source).rate for state in states], num_rows, seconds)

    def _accepted(self, state: SequenceDrafts, source: str) -> Acceptance:
        return state.accepted.get(source) or self.controls[source].of_sequence

    def _offer(
        self, sequence: EngineSequence, state: SequenceDrafts, num_rows: int, under_way: str
    ) -> tuple[str, tuple[int, ...]]:
        """Of lookup and the model, what is accepted more often; of equals lookup, which has more drafts. Not lookup that would be left out."""
        drafts, state.model_drafts = state.model_drafts, ()
        found = state.index.draft(sequence.tokens, self.controls[NGRAM].max_drafts) if self._ngram else ()
        self._judge_passed_over(sequence, state)
        if not found or not drafts:
            return (NGRAM, found) if found else (MODEL, drafts) if drafts else ("", ())
        is_better = self._accepted(state, NGRAM).rate >= self._accepted(state, MODEL).rate
        is_better = is_better and any(self._chosen(NGRAM, [state], num_rows))
        if is_better and under_way != MODEL:
            return NGRAM, found
        self._has_waiting |= is_better
        state.passed_over = (len(sequence.tokens), found)
        return MODEL, drafts

    def _judge_passed_over(self, sequence: EngineSequence, state: SequenceDrafts) -> None:
        """Lookup is judged also where it was not asked, by the tokens that came instead: else one that was wrong at first would stay so."""
        (start, found), state.passed_over = state.passed_over, (0, ())
        came = sequence.tokens[start : start + len(found)] if found else []
        if came:
            right = next((place for place, token in enumerate(came) if token != found[place]), len(came))
            self._take_verdict(state, NGRAM, len(came), right)

    def observe(self, batch: ScheduledBatch, seconds: float, *, was_ahead: bool = False) -> None:
        """The step is done, and its tokens are appended: learns from it, and lets the model draft. `was_ahead`: it was launched before it was asked
        for."""
        self._learn(batch, seconds if was_ahead or not self._is_usually_ahead(batch) else as_ahead(seconds, self.waiting_seconds))
        if self.model is not None:
            self._let_draft(self.model, batch)

    def _is_usually_ahead(self, batch: ScheduledBatch) -> bool:
        """Steps without drafts, and those with one of the model for each sequence."""
        sources = {
            self._of[chunk.sequence.id].source if chunk.drafts else "" for chunk in batch.chunks if chunk.sequence.id in self._of
        }
        return sources <= {""} or (sources == {MODEL} and self._drafts_in_step)

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
        return self._drafts_go_on or control.idle_steps >= control.probe_after - 1

    @property
    def _drafts_go_on(self) -> bool:
        """A step in which the model's drafts do not pay measures what they gain, and may be followed by drafts again."""
        control = self.controls[MODEL]
        return not control.auto or control.idle_steps < GIVEN_UP

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
                # Of a model that was given up there are no drafts, and steps count until it is tried again.
                offered=source in self._left_out or (source == MODEL and not self._drafts_go_on),
            )

    def _judge(self, chunk: Chunk, accepted: int) -> None:
        self.num_drafted += len(chunk.drafts)
        self.num_accepted += accepted
        state = self._of.get(chunk.sequence.id)
        if state is None or not state.source:
            return
        self._take_verdict(state, state.source, len(chunk.drafts), accepted)

    def _take_verdict(self, state: SequenceDrafts, source: str, drafted: int, accepted: int) -> None:
        control = self.controls[source]
        state.accepted[source] = self._accepted(state, source).judged(drafted, accepted)
        judged = control.acceptance.judged(drafted, accepted)
        self.controls[source] = msgspec.structs.replace(control, acceptance=judged)

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
        rates = [self._accepted(state, MODEL).rate for state in states]
        chosen = [max(count, 1) for count in counts(control, rates, len(wanted), self._draft_seconds)]
        for state, drafts in zip(states, model.draft(list(zip(wanted, chosen, strict=True))), strict=True):
            state.model_drafts = drafts
        if all(chunk.num_known - chunk.start == 1 for chunk in chunks):
            taken = (self._clock() - began) / max(chosen)
            self._draft_seconds += (taken - self._draft_seconds) * (0.15 if self._draft_seconds else 1)
