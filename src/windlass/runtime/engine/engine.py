"""The engine: requests in, tokens out, a step at a time. Tokens only: text belongs to the client.

A request's life: submit -> waiting -> (scheduler) running -> prefill in chunks -> one token sampled per step -> finished.
The owner calls `step` while there is work. Nothing here blocks, except for a grammar to be compiled when there is nothing else to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import msgspec
from torch import Tensor

from windlass.core.request import FinishReason, Stats, Timings, TokenLogprob, Usage
from windlass.errors import BadInput, Error
from windlass.runtime.engine.admission import Deadlines, PendingGrammars, compiled_of
from windlass.runtime.engine.execute.embed import embed
from windlass.runtime.engine.execute.runner import Decoder, Runner
from windlass.runtime.engine.protocol import Finish, SequenceOutput, Submit, TokenizerData, timeout_message
from windlass.runtime.engine.request_state import (
    LATE,
    EngineTotals,
    RequestState,
    advance_grammar,
    check_tokens,
    finish_of,
    finish_unstarted,
    new_sequence,
    prefill_stats,
    stats_of,
)
from windlass.runtime.engine.sample.grammar import GrammarCompiler, GrammarMatcher
from windlass.runtime.engine.sample.logprobs import output_logprobs, score_prompt
from windlass.runtime.engine.sample.sampler import Sampler, select_rows
from windlass.runtime.engine.schedule.scheduler import Chunk, ScheduledBatch, Scheduler, SchedulerLimits
from windlass.runtime.engine.schedule.sequence import Sequence as EngineSequence
from windlass.runtime.engine.speculate.speculation import Speculation
from windlass.runtime.engine.warm_up import measured_request, warm_up_requests
from windlass.runtime.kernels.step import KvCache
from windlass.runtime.weights.load.prefetch import trim_heap

BAD_LOGITS = "the model produced NaN or infinite logits; its weights may be damaged, or overflow their type"


class Engine:
    judge: Callable[[int, int | None], int | None] | None = None
    """For tests: (draft, sampled token) to the token that is taken."""

    def __init__(
        self,
        decoder: Decoder,
        caches: Sequence[KvCache],
        limits: SchedulerLimits,
        num_tokens: int,
        *,
        device: str = "cpu",
        record: bool = True,
        runner: type[Runner] = Runner,
        clock: Callable[[], float] = time.perf_counter,
        speculation: Speculation | None = None,
        is_invariant: bool = False,
    ) -> None:
        """`num_tokens`: vocabulary size; the decoder's logits may have more columns, for padding. `is_invariant`: see `Runner`."""
        self._clock, self.speculation = clock, speculation
        self.limits, self.num_tokens = limits, num_tokens
        self.scheduler = Scheduler(limits)
        self.runner = runner(decoder, caches, limits, device, record, num_tokens, is_invariant)
        self.sampler = Sampler(num_tokens)
        self._grammars = GrammarCompiler()
        self._sequences: dict[int, EngineSequence] = {}
        self._compiling, self._deadlines = PendingGrammars(), Deadlines()
        self._totals = EngineTotals()
        self._step_ended = self._step_seconds = 0.0
        self._is_closed = False
        self._after_step: Callable[[], None] | None = getattr(getattr(decoder, "tier", None), "after_step", None)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._compiling)

    def warm_up(self) -> None:
        """Before the first request: runs every kind of step once. Nothing of it is seen afterwards."""
        self.runner.warm_up()
        self.try_steps()

    def try_steps(self) -> None:
        """Prompts and answers, for kernels that are compiled at their first use. On several ranks, once all of them follow."""
        few, short = self.runner.copies_weights, self.runner.reads_disk
        for group in warm_up_requests(self.limits, self.num_tokens, few=few, short=short):
            for request in group:
                self.submit(request)
            self.step()
        while self.has_work:
            self.step()
        self.measure_waiting()
        self.scheduler, self._totals = Scheduler(self.limits), EngineTotals()
        if self.speculation is not None:
            self.speculation.reset()

    def measure_waiting(self) -> None:
        """What a step takes more that a model follows, and that is therefore not launched ahead: `auto` compares drafts with steps that are."""
        speculation = self.speculation
        if speculation is None or not speculation.may_leave_model_out or not self.runner.selects_tokens:
            return
        speculation.waiting_seconds = 0.0
        ahead, followed = (self._usual_seconds(speculation, is_followed) for is_followed in (False, True))
        speculation.reset()
        if ahead is not None and followed is not None:
            speculation.waiting_seconds = max(followed - ahead, 0.0)

    def _usual_seconds(self, speculation: Speculation, followed: bool) -> float | None:
        """The median of an answer's decode steps without drafts, `followed` by the model or launched ahead."""
        request = measured_request(int(followed), self.limits, self.num_tokens)
        if request is None:
            return None
        speculation.only_measure(followed=followed)
        self.submit(request)
        taken: list[float] = []
        while self.has_work:
            self.step()
            taken.append(self._step_seconds)
        return median(taken[2:]) if taken[2:] else None  # the prompt's step, and the first one after it, are others

    def submit(self, submit: Submit) -> None:
        """Raises BadInput for a request that could never finish."""
        if self._is_closed:
            raise Error("the engine is closed")
        if submit.id in self._sequences or submit.id in self._compiling:
            raise BadInput(f"request {submit.id} is already running")
        check_tokens(submit.token_ids, self.num_tokens, "the prompt", "prompt")
        check_tokens(submit.generated, self.num_tokens, "the output so far", "generated")
        check_tokens(submit.sampling.logit_bias, self.num_tokens, "logit_bias", "logit_bias")
        self._check_adapter(submit.adapter)
        if submit.grammar:
            self._compiling.add(submit, self._clock(), self._grammars.compile(submit.grammar, submit.is_slow_grammar))
        else:
            self._enter(submit, self._clock())

    def _check_adapter(self, name: str) -> None:
        adapters = self.runner.adapters
        if name and (adapters is None or name not in adapters):
            raise BadInput(f"adapter {name!r} is not loaded", field="model")

    def uses_adapter(self, name: str) -> bool:
        """Whether a request has it: waiting, running, or with a grammar that is compiled."""
        return any(one.adapter == name for one in self._sequences.values()) or self._compiling.use_adapter(name)

    def embed(self, submit: Submit) -> SequenceOutput:
        """At once, outside the schedule."""
        if submit.adapter:
            raise BadInput("embeddings are of the model without adapters; leave the adapter out of `model`", field="model")
        check_tokens(submit.token_ids, self.num_tokens, "the input", "input")
        vector = embed(self.runner.decoder, submit.token_ids, submit.pooling, self.runner.device)
        usage = Usage(prompt_tokens=len(submit.token_ids), completion_tokens=0)
        return SequenceOutput(submit.id, [], finish=Finish("stop", usage, Timings()), embedding=vector)

    def set_tokenizer(self, vocabulary: TokenizerData) -> None:
        """Needed before the first request with a grammar."""
        self._grammars.set_tokenizer(vocabulary)

    def cancel(self, number: int) -> SequenceOutput | None:
        """Frees its resources at once. None: no such request (any more)."""
        submit = self._compiling.drop(number)
        if submit is not None:
            self._grammars.release(submit.grammar)
            return SequenceOutput(number, [], finish=self._reject(submit, "cancelled"))
        sequence = self._sequences.get(number)
        return None if sequence is None else SequenceOutput(number, [], finish=self._finish(sequence, "cancelled"))

    def step(self) -> list[SequenceOutput]:
        """Expires requests past their deadline, and computes one step."""
        ended = self._admit_compiled() if self._compiling else []
        ended += self._expire() if self._deadlines else []
        return ended + self._run_step() if ended else self._run_step()

    def _run_step(self) -> list[SequenceOutput]:
        """Sequences still in prefill have no output."""
        began, under_way = 0.0, ""
        if self.speculation is not None:
            under_way = self.runner.under_way
            # A step that was launched ahead may be over by now: it took the time since the one before it was.
            began = self._step_ended if under_way else self._clock()
            self.speculation.propose(self.scheduler.running, under_way)
        batch = self.scheduler.schedule()
        if not batch.chunks:
            return []
        self._mark_started(batch)
        self._totals.steps += 1
        outputs = self._computed(batch)
        if self.speculation is not None:
            self._step_ended = self._clock()
            self._step_seconds = self._step_ended - began
            self.speculation.observe(batch, self._step_seconds, was_ahead=bool(under_way))
        return outputs

    def _computed(self, batch: ScheduledBatch) -> list[SequenceOutput]:
        tokens = self._device_tokens(batch) if self.runner.selects_tokens else None
        logits = None if tokens is not None else self.runner.run(batch.chunks)
        self.scheduler.computed(batch)
        if logits is not None:
            outputs = self._outputs(batch, logits)
        else:
            assert tokens is not None
            outputs = [self._take_all(chunk, found) for chunk, found in zip(batch.chunks, tokens, strict=True)]
        if self._after_step is not None:
            self._after_step()  # last: now the step is over, and whether it failed is known
        return outputs

    def _take_all(self, chunk: Chunk, tokens: Sequence[int | None]) -> SequenceOutput:
        """What the device chose for the rows of a sequence: up to the first that is not the draft."""
        outputs: dict[int, SequenceOutput] = {}
        for depth, token in enumerate(tokens):
            if not self._take(chunk, depth, token, {}, outputs):
                break
        return outputs[chunk.sequence.id]

    def stats(self) -> Stats:
        return stats_of(self.scheduler, self._totals, len(self._compiling), self.speculation)

    def close(self) -> None:
        """Frees weights, cache and buffers; drops unfinished requests. May be called twice."""
        self._is_closed = True
        for number in [*self._sequences, *self._compiling]:
            self.cancel(number)
        self._grammars.close()
        self._after_step = None  # which holds the weights
        if hasattr(self, "runner"):
            tier = getattr(self.runner.decoder, "tier", None)
            if tier is not None:
                tier.close()
            del self.runner
            trim_heap()

    # --- admission

    def _enter(self, submit: Submit, submitted: float, matcher: GrammarMatcher | None = None) -> None:
        sequence = new_sequence(submit, submitted, matcher, self.sampler, self.limits)
        self.scheduler.submit(sequence)
        self._sequences[submit.id] = sequence
        if submit.deadline_seconds is not None:
            self._deadlines.add(submitted + submit.deadline_seconds, submit.id, self._sequences)

    def _admit_compiled(self) -> list[SequenceOutput]:
        """Admits requests whose grammar is compiled, rejects those whose grammar failed. Blocks only if there is nothing else to do."""
        ended: list[SequenceOutput] = []
        for submit, submitted, future in self._compiling.ready(may_wait=not self.scheduler.has_work):
            try:
                self._enter(submit, submitted, compiled_of(future).matcher(submit.stop_token_ids))
                ended.append(SequenceOutput(submit.id, []))
            except Error as error:
                ended.append(SequenceOutput(submit.id, [], finish=self._reject(submit, "error", error)))
        return ended

    def _reject(self, submit: Submit, reason: FinishReason, error: Error | None = None) -> Finish:
        """Cancelled, or an invalid grammar: not counted as a failure."""
        self._totals.by_reason["cancelled"] += reason == "cancelled"
        return finish_unstarted(submit, reason, error)

    def _expire(self) -> list[SequenceOutput]:
        """Requests past their deadline, waiting or running."""
        passed = [self._sequences[number] for number in self._deadlines.expired(self._clock()) if number in self._sequences]
        return [SequenceOutput(sequence.id, [], finish=self._finish_expired(sequence)) for sequence in passed]

    def _finish_expired(self, sequence: EngineSequence) -> Finish:
        return self._finish(sequence, "error", timeout_message(sequence.request.submit.deadline_seconds), LATE)

    def _mark_started(self, batch: ScheduledBatch) -> None:
        for chunk in batch.chunks:
            request: RequestState = chunk.sequence.request
            if request.started is None:
                request.started = self._clock()
                if not request.submit.generated:  # otherwise the lost engine counted it
                    self._totals.prompt_tokens += chunk.sequence.num_prompt

    def _device_tokens(self, batch: ScheduledBatch) -> list[list[int | None]] | None:
        """If the whole step is greedy the device selects the tokens of all rows itself."""
        for chunk in batch.chunks:
            request: RequestState = chunk.sequence.request
            if not chunk.sequence.max_tokens or not request.sampling_state.is_argmax or chunk.sequence.adapter:
                return None
            if request.submit.logprobs is not None or request.submit.prompt_logprobs is not None:
                return None
        if self.speculation is not None and any(chunk.drafts for chunk in batch.chunks):
            found = self.runner.verified(batch.chunks, self._continues(batch) and self.speculation.goes_on)
            if found is None:
                return None
            self.speculation.take_drafts(batch.chunks, found[1])
            return found[0]
        ahead = self._continues(batch) and (self.speculation is None or self.speculation.is_idle(batch.chunks))
        tokens = self.runner.next_tokens(batch.chunks, ahead)
        return None if tokens is None else [[token] for token in tokens]

    def _continues(self, batch: ScheduledBatch) -> bool:
        """Whether the next step will probably have the same sequences."""
        return not self.scheduler.waiting and all(
            chunk.sequence.num_output + 1 < chunk.sequence.max_tokens for chunk in batch.chunks
        )

    def _outputs(self, batch: ScheduledBatch, logits: Tensor) -> list[SequenceOutput]:
        sampled: list[tuple[Chunk, int]] = []
        ended: list[SequenceOutput] = []
        row = 0
        for chunk in batch.chunks:
            row += chunk.num_logits
            sequence = chunk.sequence
            if sequence.request.prompt_logprobs is not None:
                score_prompt(self.sampler, chunk, logits[row - chunk.num_logits : row])
            if not chunk.is_sampled:
                continue
            if sequence.max_tokens:
                sampled.append((chunk, row - 1 - len(chunk.drafts)))
            else:  # a scoring request
                finish = self._finish(sequence, "length")
                ended.append(SequenceOutput(sequence.id, [], prompt_logprobs=sequence.request.prompt_logprobs, finish=finish))
        return ended + self._sample(sampled, logits) if sampled else ended

    def _sample(self, sampled: list[tuple[Chunk, int]], logits: Tensor) -> list[SequenceOutput]:
        """The next token of each sequence, from its row of logits. While a token is the one that was drafted, the next row follows it: every
        token is sampled as it would be without drafts."""
        outputs: dict[int, SequenceOutput] = {}
        depth = 0
        while sampled:
            rows, sequences = [row + depth for _, row in sampled], [chunk.sequence for chunk, _ in sampled]
            wanted = select_rows(logits, rows)
            tokens = self.sampler.sample(wanted, [sequence.request.sampling_state for sequence in sequences])
            logprobs = output_logprobs(self.sampler, sequences, tokens, wanted)
            going: list[tuple[Chunk, int]] = []
            for (chunk, row), token in zip(sampled, tokens, strict=True):
                if self._take(chunk, depth, token, logprobs, outputs):
                    going.append((chunk, row))
            sampled, depth = going, depth + 1
        return list(outputs.values())

    def _take(
        self,
        chunk: Chunk,
        depth: int,
        token: int | None,
        logprobs: dict[int, list[TokenLogprob]],
        outputs: dict[int, SequenceOutput],
    ) -> bool:
        """Whether the token is the draft, and the sequence goes on."""
        number, draft = chunk.sequence.id, chunk.drafts[depth] if depth < len(chunk.drafts) else None
        if draft is not None and self.judge is not None:
            token = self.judge(draft, token)
        accepted = draft is not None and token == draft
        output = self._output(chunk.sequence, token, logprobs.get(number, []), is_computed=accepted)
        outputs[number] = _joined(outputs[number], output) if number in outputs else output
        return accepted and output.finish is None

    def _output(
        self, sequence: EngineSequence, token: int | None, logprobs: list[TokenLogprob], *, is_computed: bool = False
    ) -> SequenceOutput:
        request: RequestState = sequence.request
        if token is None:
            return SequenceOutput(sequence.id, [], finish=self._failed(sequence))
        request.sampling_state.record(token)
        self._totals.completion_tokens += 1
        reason = self.scheduler.append(sequence, token, is_computed=is_computed)
        reason = advance_grammar(request.sampling_state.matcher, token, reason)
        prompt_logprobs = prefill = None
        if request.first_token is None:
            request.first_token = self._clock()
            prompt_logprobs, prefill = request.prompt_logprobs, prefill_stats(sequence, request.first_token)
        finish = None if reason is None else self._finish(sequence, reason)
        return SequenceOutput(sequence.id, [token], logprobs, prompt_logprobs, prefill, finish)

    def _failed(self, sequence: EngineSequence) -> Finish:
        """No token could be sampled."""
        matcher = sequence.request.sampling_state.matcher
        if matcher is not None and matcher.error:
            return self._finish(sequence, "error", matcher.error, BadInput.__name__, "constraint")
        return self._finish(sequence, "error", BAD_LOGITS)

    def _finish(self, sequence: EngineSequence, reason: FinishReason, error: str = "", kind: str = "", field: str = "") -> Finish:
        """Removes a sequence."""
        self.scheduler.remove(sequence)
        del self._sequences[sequence.id]
        if self.speculation is not None:
            self.speculation.forget(sequence)
        self._totals.by_reason[LATE if kind == LATE else reason] += 1
        return finish_of(sequence, reason, self._clock(), error, kind, field)


def _joined(first: SequenceOutput, then: SequenceOutput) -> SequenceOutput:
    """Of several tokens in one step."""
    return msgspec.structs.replace(
        first, token_ids=first.token_ids + then.token_ids, logprobs=first.logprobs + then.logprobs, finish=then.finish
    )
