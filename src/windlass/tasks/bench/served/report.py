"""Report of `windlass bench --served`: JSON, and servers compared with the first one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.core.model import Frozen
from windlass.errors import BadInput
from windlass.tasks.bench.served.load import Load
from windlass.tasks.bench.served.summary import Limits, LoadResult

REPORT_VERSION = 1
KIND = "served"


class TargetReport(Frozen):
    name: str
    """As on the command line."""
    model: str
    options: tuple[str, ...] = ()
    """How our own server ran the model, as far as the name does not say it."""
    owner: str = ""
    context_tokens: int = 0
    asked: str = ""
    """How: route, prompts as ids or text, and whether answers are held to their length."""
    ready_seconds: tuple[float, ...] = ()
    """Of every start of our own server."""
    results: tuple[LoadResult, ...] = ()

    @property
    def title(self) -> str:
        return " ".join((self.name, *self.options))


class ServedReport(Frozen):
    targets: tuple[TargetReport, ...]
    limits: Limits = Limits()
    rounds: int = 1
    seed: str = ""
    machine: str = ""
    """Of the client."""
    made_at: str = ""
    windlass: str = ""
    kind: str = KIND
    version: int = REPORT_VERSION


def encode_report(report: ServedReport) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=1)


def read_report(text: bytes, where: str) -> ServedReport:
    try:
        found = msgspec.json.decode(text, type=ServedReport)
    except DECODE_ERRORS as error:
        raise BadInput(f"{where} is not a report of `windlass bench --served --save`: {error}") from None
    if (found.kind, found.version) != (KIND, REPORT_VERSION):
        raise BadInput(f"{where} has version {found.version}; this Windlass reads version {REPORT_VERSION}: measure again")
    return found


class Metric(Frozen):
    name: str
    unit: str
    more_is_better: bool
    value: Callable[[LoadResult], float | None]


METRICS = (
    Metric(name="output", unit="tok/s", more_is_better=True, value=lambda one: one.output_tokens_per_second),
    Metric(name="first token p50", unit="s", more_is_better=False, value=lambda one: one.first_token and one.first_token.p50),
    Metric(name="first token p99", unit="s", more_is_better=False, value=lambda one: one.first_token and one.first_token.p99),
    Metric(name="between p50", unit="s", more_is_better=False, value=lambda one: one.between_tokens and one.between_tokens.p50),
    Metric(name="between p99", unit="s", more_is_better=False, value=lambda one: one.between_tokens and one.between_tokens.p99),
    Metric(name="goodput", unit="/s", more_is_better=True, value=lambda one: one.goodput_per_second),
)


class Compared(Frozen):
    """One server under one load, beside the first server that was measured under the same."""

    load: Load
    target: str
    values: tuple[float | None, ...]
    """In the order of METRICS."""
    ratios: tuple[float | None, ...]
    """To the first server, so that above 1 is better whatever the metric; None for the first itself, or without a value."""


def compare(targets: Sequence[TargetReport]) -> tuple[Compared, ...]:
    """Loads that at least two servers had, in the first one's order. A name that comes twice is told apart by its place."""
    return tuple(row for key in _keys(targets) for row in _rows(targets, key))


Key = tuple[int, float, int, int]


def _key(load: Load) -> Key:
    """How long it was measured does not matter."""
    return load.at_once, load.rate, load.prompt_tokens, load.new_tokens


def _keys(targets: Sequence[TargetReport]) -> list[Key]:
    all_keys = [_key(result.load) for target in targets for result in target.results]
    return [key for key in dict.fromkeys(all_keys) if all_keys.count(key) > 1]


def _rows(targets: Sequence[TargetReport], key: Key) -> Iterator[Compared]:
    first: tuple[float | None, ...] | None = None
    names = [target.title for target in targets]
    for place, target in enumerate(targets, 1):
        for result in (result for result in target.results if _key(result.load) == key):
            values = tuple(metric.value(result) for metric in METRICS)
            ratios = tuple(None for _ in METRICS) if first is None else tuple(map(_ratio, METRICS, values, first))
            first = first or values
            name = target.title if names.count(target.title) == 1 else f"{target.title} ({place})"
            yield Compared(load=result.load, target=name, values=values, ratios=ratios)


def _ratio(metric: Metric, value: float | None, first: float | None) -> float | None:
    if value is None or first is None:
        return None
    better, worse = (value, first) if metric.more_is_better else (first, value)
    return better / worse if worse else None
