"""Records of requests -> throughput, percentiles and goodput. Pure.

**Steady window.** A closed loop begins with all users at once and ends with fewer and fewer of them. Throughput is counted from the end
of the first answer to the moment the last request is sent: all users are busy throughout, and users who move in step are counted in
whole turns, prompts and answers alike. Percentiles are over all requests, the first included.

**Goodput** (arXiv 2401.09670): requests that keep both limits, per second; the limit between tokens is on a request's mean.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from windlass.core.model import Frozen
from windlass.tasks.bench.served.load import Load
from windlass.tasks.bench.served.record import EngineSteps, LoadRun, RequestRecord

MIN_STEADY_SHARE = 0.25
"""Of the time until the last request is sent: users in step with three requests each have half of it."""


class Percentiles(Frozen):
    """In seconds."""

    p50: float
    p90: float
    p99: float
    mean: float
    largest: float


class Limits(Frozen):
    """For goodput; None: any time is good enough."""

    first_token_seconds: float | None = None
    between_tokens_seconds: float | None = None

    @property
    def is_set(self) -> bool:
        return self.first_token_seconds is not None or self.between_tokens_seconds is not None

    def keeps(self, record: RequestRecord) -> bool:
        if not record.is_answered:
            return False
        first, between = self.first_token_seconds, self.between_tokens_seconds
        return (first is None or record.first_token_seconds <= first) and (
            between is None or record.mean_between_seconds <= between
        )


class LoadResult(Frozen):
    """One load against one server, all rounds together."""

    load: Load
    requests: int
    answered: int
    errors: dict[str, int]
    """How many failed, by reason."""
    is_steady: bool
    """False: too few requests for a steady window; rates are over the whole run."""
    window_seconds: float
    output_tokens_per_second: float
    requests_per_second: float
    """Answers given."""
    whole_tokens_per_second: float
    """From the first request to the last token, not the steady window alone."""
    rounds_tokens_per_second: tuple[float, ...]
    first_token: Percentiles | None
    between_tokens: Percentiles | None
    """Between events of an answer."""
    end_to_end: Percentiles | None
    goodput_per_second: float | None = None
    """None: no limit is set."""
    within_limits: float | None = None
    """Share of all requests; failed ones are not within."""
    prompt_tokens: float = 0.0
    """Mean, as the server counts; so are the next two."""
    output_tokens: float = 0.0
    cached_tokens: float = 0.0
    tokens_per_event: float = 1.0
    short_answers: int = 0
    """Ended before the length that was asked for."""
    client_cpu_seconds_per_token: float = 0.0
    client_cpu_share: float = 0.0
    """Of one core."""
    steps: EngineSteps | None = None


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values, linear between neighbours (numpy's default)."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def percentiles(values: Iterable[float]) -> Percentiles | None:
    """None of none."""
    ordered = sorted(values)
    if not ordered:
        return None
    p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
    return Percentiles(p50=p50, p90=p90, p99=p99, mean=sum(ordered) / len(ordered), largest=ordered[-1])


def steady_window(records: Sequence[RequestRecord]) -> tuple[float, float] | None:
    """From the first answer's end to the last request's start; None if that is too little of the run: with two requests per user, both may lie
    in the moment in which the first answers end."""
    ends = [record.ended for record in records if record.is_answered]
    if not ends:
        return None
    sent = [record.sent for record in records]
    begin, end = min(ends), max(sent)
    return (begin, end) if end - begin > MIN_STEADY_SHARE * (end - min(sent)) else None


def summarize(runs: Sequence[LoadRun], limits: Limits) -> LoadResult:
    """Of one load, one or more rounds."""
    records = [record for run in runs for record in run.records]
    answered = [record for record in records if record.is_answered]
    steady = [steady_window(run.records) for run in runs]
    is_steady = all(window is not None for window in steady)
    windows = [window if is_steady and window else _whole(run) for run, window in zip(runs, steady, strict=True)]
    rates = [_tokens(run, *window) / _length(window) for run, window in zip(runs, windows, strict=True)]
    seconds = sum(map(_length, windows))
    tokens = sum(record.num_tokens for record in answered)
    return LoadResult(
        load=runs[0].load,
        requests=len(records),
        answered=len(answered),
        errors=dict(Counter(record.error or "an answer without a token" for record in records if not record.is_answered)),
        is_steady=is_steady,
        window_seconds=seconds,
        output_tokens_per_second=sum(rate * _length(window) for rate, window in zip(rates, windows, strict=True)) / seconds,
        requests_per_second=_answers(runs, windows, lambda _: True) / seconds,
        whole_tokens_per_second=tokens / sum(_length(_whole(run)) for run in runs),
        rounds_tokens_per_second=tuple(rates),
        first_token=percentiles(record.first_token_seconds for record in answered),
        between_tokens=percentiles(gap for record in answered for gap in _gaps(record)),
        end_to_end=percentiles(record.end_to_end_seconds for record in answered),
        goodput_per_second=_answers(runs, windows, limits.keeps) / seconds if limits.is_set else None,
        within_limits=sum(map(limits.keeps, records)) / len(records) if limits.is_set and records else None,
        prompt_tokens=_mean(record.prompt_tokens for record in answered),
        output_tokens=_mean(record.num_tokens for record in answered),
        cached_tokens=_mean(record.cached_tokens for record in answered),
        tokens_per_event=tokens / max(sum(len(record.times) for record in answered), 1),
        short_answers=sum(record.num_tokens < runs[0].load.new_tokens for record in answered),
        client_cpu_seconds_per_token=sum(run.client_cpu_seconds for run in runs) / max(tokens, 1),
        client_cpu_share=sum(run.client_cpu_seconds for run in runs) / sum(_length((run.began, run.ended)) for run in runs),
        steps=_steps([run.steps for run in runs]),
    )


def _gaps(record: RequestRecord) -> Iterable[float]:
    return (after - before for before, after in pairwise(record.times))


def _whole(run: LoadRun) -> tuple[float, float]:
    """To the last token, not to the last chunk behind it."""
    return run.began, max((record.times[-1] for record in run.records if record.is_answered), default=run.ended)


def _length(window: tuple[float, float]) -> float:
    return max(window[1] - window[0], 1e-9)


def _tokens(run: LoadRun, begin: float, end: float) -> float:
    """Of requests that were answered in full: what came of a failed one is of no use."""
    return sum(record.tokens_in(begin, end) for record in run.records if record.is_answered)


def _answers(runs: Sequence[LoadRun], windows: Sequence[tuple[float, float]], counts: Callable[[RequestRecord], bool]) -> float:
    """Answers given within the windows. One that lies partly within counts for its share of tokens: users may move in step, and
    whether all of their answers end just before or just after an edge is chance."""
    pairs = zip(runs, windows, strict=True)
    return sum(
        one.tokens_in(*window) / one.num_tokens for run, window in pairs for one in run.records if one.is_answered and counts(one)
    )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0


def _steps(found: Sequence[EngineSteps | None]) -> EngineSteps | None:
    counted = [one for one in found if one is not None]
    if len(counted) < len(found):
        return None
    return EngineSteps(
        steps=sum(one.steps for one in counted),
        output_tokens=sum(one.output_tokens for one in counted),
        prompt_tokens=sum(one.prompt_tokens for one in counted),
        preemptions=sum(one.preemptions for one in counted),
    )
