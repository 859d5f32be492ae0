"""What the engine keeps of a request besides its sequence, and what it reports of one. Changes no scheduler."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from windlass.core.client import Broken, Late
from windlass.core.request import FinishReason, Stats, Timings, TokenLogprob, Usage
from windlass.errors import BadInput, Error
from windlass.runtime.engine.protocol import Finish, PrefillStats, Submit
from windlass.runtime.engine.sample.grammar import GrammarMatcher, WithoutStops
from windlass.runtime.engine.sample.sampler import Sampler, SamplingState
from windlass.runtime.engine.schedule.scheduler import Scheduler, SchedulerLimits
from windlass.runtime.engine.schedule.sequence import Sequence as EngineSequence
from windlass.runtime.engine.speculate.speculation import Speculation

LATE = Late.__name__


@dataclass(slots=True, eq=False)
class RequestState:
    """What the engine keeps of a request besides its sequence."""

    submit: Submit
    sampling_state: SamplingState
    submitted: float
    started: float | None = None
    first_token: float | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None


@dataclass(slots=True)
class EngineTotals:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    steps: int = 0
    by_reason: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("stop", "length", "cancelled", "error", LATE), 0))


# --- admission


def check_tokens(tokens: Collection[int], num_tokens: int, what: str, field: str) -> None:
    lowest, highest = min(tokens, default=0), max(tokens, default=0)
    if lowest < 0 or highest >= num_tokens:
        unknown = lowest if lowest < 0 else highest
        raise BadInput(f"{what} has token {unknown}; this model's tokens are 0 to {num_tokens - 1}", field=field)


def new_sequence(
    submit: Submit, submitted: float, matcher: GrammarMatcher | None, sampler: Sampler, limits: SchedulerLimits
) -> EngineSequence:
    num_prompt = len(submit.token_ids)
    room = max(limits.longest_sequence - num_prompt, 1)  # the scheduler rejects a prompt that leaves no room
    unscored: list[TokenLogprob | None] = [None] * num_prompt
    prompt_logprobs = None if submit.prompt_logprobs is None else unscored
    if submit.min_tokens:
        matcher = WithoutStops(matcher, submit.min_tokens, sampler.num_tokens, submit.stop_token_ids)
    state = sampler.new_state(submit.sampling, submit.token_ids, matcher)
    for token in submit.generated:
        state.record(token)
        advance_grammar(matcher, token, None)
    request = RequestState(submit=submit, sampling_state=state, submitted=submitted, prompt_logprobs=prompt_logprobs)
    return EngineSequence(
        id=submit.id,
        tokens=[*submit.token_ids, *submit.generated],
        num_prompt=num_prompt,
        max_tokens=room if submit.max_tokens is None else submit.max_tokens,
        stop_token_ids=frozenset(submit.stop_token_ids),
        salt=_salt(submit),
        owner=submit.owner,
        priority=submit.priority,
        adapter=submit.adapter,
        chain=_salt(submit),
        scored_from=None if submit.prompt_logprobs is None else submit.prompt_logprobs_start,
        request=request,
    )


def _salt(submit: Submit) -> str:
    """Keys and values depend on the adapter, so that cached prefixes are shared only among requests with the same one."""
    return f"{submit.adapter}\0{submit.cache_salt}" if submit.adapter else submit.cache_salt


def advance_grammar(matcher: GrammarMatcher | None, token: int, reason: FinishReason | None) -> FinishReason | None:
    """Advances the grammar; a complete grammar ends the output like a stop token."""
    if matcher is None or reason == "stop":
        return reason
    matcher.advance(token)
    return "stop" if matcher.is_complete else reason


# --- reports


def finish_unstarted(submit: Submit, reason: FinishReason, error: Error | None) -> Finish:
    """Of a request that never reached the scheduler."""
    usage = Usage(prompt_tokens=len(submit.token_ids), completion_tokens=0)
    if error is None:
        return Finish(reason, usage, Timings())
    kind = type(error).__name__ if isinstance(error, BadInput) else "" if isinstance(error, Broken) else BadInput.__name__
    return Finish(reason, usage, Timings(), None, str(error), kind, getattr(error, "field", ""))


def finish_of(sequence: EngineSequence, reason: FinishReason, now: float, error: str, kind: str, field: str) -> Finish:
    usage = Usage(
        prompt_tokens=sequence.num_prompt, completion_tokens=sequence.num_output, cached_tokens=max(sequence.num_cached, 0)
    )
    stop_token_id = sequence.tokens[-1] if reason == "stop" and sequence.tokens[-1] in sequence.stop_token_ids else None
    return Finish(reason, usage, _timings(sequence.request, now), stop_token_id, error, kind, field)


def prefill_stats(sequence: EngineSequence, now: float) -> PrefillStats:
    timings = _timings(sequence.request, now)
    return PrefillStats(max(sequence.num_cached, 0), timings.queue_seconds, timings.prefill_seconds)


def _timings(request: RequestState, now: float) -> Timings:
    started = now if request.started is None else request.started
    first = now if request.first_token is None else request.first_token
    return Timings(
        queue_seconds=started - request.submitted,
        prefill_seconds=first - started,
        decode_seconds=now - first,
    )


def stats_of(scheduler: Scheduler, totals: EngineTotals, num_compiling: int, speculation: Speculation | None) -> Stats:
    pool = scheduler.pool
    return Stats(
        waiting=len(scheduler.waiting) + num_compiling,
        running=len(scheduler.running),
        num_blocks=pool.num_blocks,
        blocks_used=pool.num_blocks - pool.num_free,
        blocks_cached=pool.num_evictable,
        prompt_tokens=totals.prompt_tokens,
        completion_tokens=totals.completion_tokens,
        prefix_query_tokens=scheduler.prefix_query_tokens,
        prefix_hit_tokens=scheduler.prefix_hit_tokens,
        preemptions=scheduler.num_preemptions,
        steps=totals.steps,
        finished=totals.by_reason["stop"] + totals.by_reason["length"],
        cancelled=totals.by_reason["cancelled"],
        failed=totals.by_reason["error"],
        late=totals.by_reason[LATE],
        drafted=0 if speculation is None else speculation.num_drafted,
        accepted=0 if speculation is None else speculation.num_accepted,
    )
