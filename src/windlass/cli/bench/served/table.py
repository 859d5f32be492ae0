"""Output of `windlass bench --served`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from windlass.cli.bench.table import SPECULATION_NOTE
from windlass.cli.console import console
from windlass.units import format_context, format_rate, format_seconds

if TYPE_CHECKING:
    from windlass.tasks.bench.served.report import Compared, Metric, ServedReport, TargetReport
    from windlass.tasks.bench.served.summary import Limits, LoadResult, Percentiles

BUSY_SHARE = 0.6
"""Of a core: from here on the client may be what is slow."""


def show(report: ServedReport, old: ServedReport | None, written: Path | None) -> None:
    from windlass.tasks.bench.served.report import compare

    out = console()
    if report.limits.is_set:
        out.print(f"goodput: requests with {limits_text(report.limits)}")
    for target in report.targets:
        out.print(_title(target))
        out.print(_results(target, report.limits))
        out.print(_details(target))
        for note in notes(target):
            out.print(escape(note))
    earlier = () if old is None else old.targets
    rows = compare([*earlier, *report.targets])
    if rows:
        out.print(_compared(rows))
    elif old is not None:
        out.print("nothing to compare: the earlier report has no load of as many users and as many tokens")
    if written is not None:
        out.print(f"wrote {written}")


def _title(target: TargetReport) -> str:
    context = f", {format_context(target.context_tokens)} context" if target.context_tokens else ""
    ready = f"; ready after {', '.join(map(format_seconds, target.ready_seconds))}" if target.ready_seconds else ""
    model = f" ({escape(target.model)}{context})" if target.model != target.name else context
    return f"[bold]{escape(target.title)}[/]{model}{ready}; {target.asked}"


def _table(title: str = "") -> Table:
    return Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0), title=title or None, title_justify="left")


COLUMNS = ("at once", "prompt + new", "output", "requests", "first p50 / p90 / p99", "between p50 / p90 / p99", "whole p50 / p99")


def _results(target: TargetReport, limits: Limits) -> Table:
    table = _table()
    goodput = ["goodput", "within"] if limits.is_set else []
    for name in (*COLUMNS, *goodput, "errors"):
        table.add_column(name, justify="right")
    for result in target.results:
        table.add_row(*_row(result))
    return table


def limits_text(limits: Limits) -> str:
    first, between = limits.first_token_seconds, limits.between_tokens_seconds
    parts = [f"the first token within {format_seconds(first)}"] if first is not None else []
    return " and ".join(parts + ([f"at most {format_seconds(between)} between tokens"] if between is not None else []))


def _row(result: LoadResult) -> Iterator[str]:
    yield result.load.name
    yield result.load.shape
    yield f"{format_rate(result.output_tokens_per_second)} tok/s{'' if result.is_steady else ' *'}"
    yield f"{format_rate(result.requests_per_second)}/s"
    yield _spread(result.first_token, "p50 p90 p99")
    yield _spread(result.between_tokens, "p50 p90 p99")
    yield _spread(result.end_to_end, "p50 p99")
    if result.goodput_per_second is not None:
        yield f"{format_rate(result.goodput_per_second)}/s"
        yield f"{result.within_limits or 0:.0%}"
    failed = result.requests - result.answered
    yield f"[red]{failed} of {result.requests}[/]" if failed else "0"


def _spread(found: Percentiles | None, names: str) -> str:
    return "-" if found is None else " / ".join(format_seconds(getattr(found, name)) for name in names.split())


DETAILS = (
    "at once",
    "server counted",
    "tokens/event",
    "engine steps",
    "a step: prompt + new",
    "preempted",
    "client CPU",
    "of a core",
)


def _details(target: TargetReport) -> Table:
    """What the server counted, and what the client itself took."""
    has_steps = any(result.steps is not None for result in target.results)
    hidden = () if has_steps else ("engine steps", "a step: prompt + new", "preempted")
    table = _table()
    for name in DETAILS:
        if name not in hidden:
            table.add_column(name, justify="right")
    for result in target.results:
        cells = zip(DETAILS, _detail(result), strict=True)
        table.add_row(*(cell for name, cell in cells if name not in hidden))
    return table


def _detail(result: LoadResult) -> Iterator[str]:
    yield result.load.name
    yield f"{result.prompt_tokens:,.5g} + {result.output_tokens:,.5g}"
    yield f"{result.tokens_per_event:.2f}"
    steps = result.steps
    yield "-" if steps is None else f"{steps.steps:,}"
    yield "-" if steps is None else f"{steps.prompt_tokens_per_step:.1f} + {steps.output_tokens_per_step:.1f}"
    yield "-" if steps is None else f"{steps.preemptions:,}"
    yield f"{1e6 * result.client_cpu_seconds_per_token:.0f} us/token"
    yield f"{result.client_cpu_share:.1%}"


def notes(target: TargetReport) -> Iterator[str]:
    """What a reader of the tables should know."""
    if any(not result.is_steady for result in target.results):
        yield "* over the whole run: too few requests for a steady window; raise --requests or --seconds"
    if any(result.client_cpu_share > BUSY_SHARE for result in target.results):
        yield "the client itself was busy: the server may be faster than this"
    if any(result.cached_tokens for result in target.results):
        yield "some prompt tokens were found in the server's prefix cache, although no prompts share a prefix"
    for result in target.results:
        for reason, count in result.errors.items():
            yield f"{result.load.title}: {count} of {result.requests} requests failed ({reason}); the figures are those of the others"
    if "--speculate" in target.title and "--speculate off" not in target.title:
        yield SPECULATION_NOTE
    short = sum(result.short_answers for result in target.results)
    if short:
        yield f"{short} answers ended before their length"
    for result in target.results:
        for error, count in sorted(result.errors.items(), key=lambda pair: -pair[1]):
            yield f"{result.load.title}: {count} x {error}"


# --- compared ----------------------------------------------------------------------------------------------------------


def _compared(rows: tuple[Compared, ...]) -> Table:
    from windlass.tasks.bench.served.report import METRICS

    table = _table("compared with the first; ratios above 1 are better")
    table.add_column("at once", justify="right")
    table.add_column("server")
    shown = [place for place in range(len(METRICS)) if any(row.values[place] is not None for row in rows)]
    for place in shown:
        table.add_column(METRICS[place].name, justify="right")
    before = ""
    for row in rows:
        name = f"{row.load.name} ({row.load.shape})"
        cells = (_cell(METRICS[place], row.values[place], row.ratios[place]) for place in shown)
        table.add_row("" if name == before else name, escape(row.target), *cells)
        before = name
    return table


def _cell(metric: Metric, value: float | None, ratio: float | None) -> str:
    if value is None:
        return "-"
    text = (
        format_seconds(value)
        if metric.unit == "s"
        else f"{format_rate(value)}{'' if metric.unit[0] == '/' else ' '}{metric.unit}"
    )
    if ratio is None:
        return text
    colour = "green" if ratio > 1.02 else "red" if ratio < 0.98 else "dim"
    return f"{text} [{colour}]{ratio:.2f}x[/]"
