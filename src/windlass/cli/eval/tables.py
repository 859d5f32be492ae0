"""Tables of `windlass eval` in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from windlass.cli.console import console
from windlass.core.statistics.intervals import show_interval, show_percent, show_points
from windlass.tasks.evaluate.report.compare import Comparison
from windlass.tasks.evaluate.report.markdown import accuracy
from windlass.tasks.evaluate.report.report import Report
from windlass.tasks.evaluate.report.results import Measured, Result
from windlass.tasks.evaluate.run.estimate import Estimate
from windlass.units import format_bytes, format_count, format_seconds

CERTAIN = 0.05


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A column whose name begins with # is a number. Cells are text as it stands: servers and harnesses write in brackets."""
    made = Table(title=escape(title), title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in columns:
        made.add_column(name.removeprefix("#"), justify="right" if name.startswith("#") else "left")
    for row in rows:
        made.add_row(*map(Text, row))
    return made


def show_report(report: Report, clock: Sequence[Measured], written: Sequence[Path]) -> None:
    out = console()
    columns = (
        "model",
        "task",
        "category",
        "#questions",
        "#accuracy",
        "#95 %",
        "#strict",
        "#flexible",
        "#truncated",
        "#failed",
        "#time",
        "#energy",
    )
    rows = [_row(one, times) for one, times in zip(report.results, clock, strict=True)]
    out.print(table("", columns, rows))
    for one in report.results:
        if one.num_samples > 1:
            shares = ", ".join(f"pass@{k} {show_percent(value, one.interval)}" for k, value in one.pass_at.items())
            out.print(f"{one.model}, {one.task}: {shares}", markup=False)
        if one.num_failed_requests:
            out.print(
                f"{one.model}, {one.task}: {one.num_failed_requests:,} requests failed, most often: {one.failure[:200]}",
                markup=False,
            )
        if one.num_pending:
            out.print(f"{one.model}, {one.task}: {one.num_pending:,} programs were not run", markup=False)
        if one.num_not_asked:
            out.print(f"{one.model}, {one.task}: {one.num_not_asked:,} questions were not asked", markup=False)
    if report.comparisons:
        out.print(comparison_table(report.comparisons))
    out.print(f"\n{', '.join(str(path) for path in written)}", markup=False)


def show_harness(found: dict[str, Any]) -> None:
    from windlass.cli.eval.harness import harness_rows

    for model, results in found.items():
        columns = ("task", "metric", "filter", "#value", "#standard error")
        console().print(table(f"\n{model}, by lm-evaluation-harness", columns, harness_rows(results)))


def _row(one: Result, clock: Measured) -> list[str]:
    return [
        one.model, one.task, one.category, f"{one.num_examples:,}", accuracy(one), show_interval(one.interval),
        _share(one.strict_accuracy, one), _share(one.flexible_accuracy, one), f"{one.num_truncated:,}",
        f"{one.num_failed_requests:,}", format_seconds(clock.seconds), "" if clock.joules is None else f"{format_count(clock.joules)}J",
    ]  # fmt: skip


def _share(value: float | None, one: Result) -> str:
    return "" if value is None else show_percent(value, one.interval)


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    columns = ("difference of", "task", "#questions", "#points", "#95 %", "#p", "#smallest that would show", "")
    rows = [
        [
            f"{one.b} over {one.a}", one.task, f"{one.num_questions:,}", show_points(one.difference, one.interval),
            show_interval(one.interval), f"{one.p:.2g}", f"{100 * one.smallest_detectable:.1f}", _verdict(one),
        ]
        for one in comparisons
    ]  # fmt: skip
    return table("\nCompared on the same questions, in points of 100", columns, rows)


def _verdict(one: Comparison) -> str:
    said = "no difference shown" if one.p > CERTAIN else f"{one.b if one.difference > 0 else one.a} is better"
    return said if one.same_prompts else f"{said}; prompts differ"


def estimate_line(found: Estimate) -> str:
    parts = [
        f"{found.num_requests:,} questions, about {format_count(found.prompt_tokens)} + {format_count(found.answer_tokens)} tokens"
    ]
    if found.seconds is not None:
        parts.append(f"{format_seconds(found.seconds)} by {found.source}")
    if found.joules is not None:
        parts.append(f"{format_count(found.joules)}J, {found.kg_co2 or 0:.2g} kg CO2")
    if found.usd is not None:
        parts.append(f"${found.usd:.2f}")
    if found.memory_bytes:
        parts.append(f"{format_bytes(found.memory_bytes)} of memory")
    parts.append(f"{format_bytes(found.disk_bytes)} of disk")
    return ", ".join(parts)


def show_tasks(as_json: bool) -> None:
    from windlass.tasks.evaluate.tasks.catalog import builtin
    from windlass.tasks.evaluate.tasks.sources import is_here

    found = builtin().values()
    if as_json:
        rows: list[dict[str, Any]] = [
            {
                "name": task.name, "title": task.title, "category": task.category, "grader": task.grader, "is_here": is_here(task),
                "file": task.source.file, "package": task.source.package, "sha256": task.source.sha256,
                "licence": task.source.licence, "url": task.source.url,
            }
            for task in found
        ]  # fmt: skip
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode() + "\n")
        return
    lines = [
        [
            task.name, task.category, task.title, "made here" if task.source.generated else "here" if is_here(task) else "not here",
            task.source.file and f"$WINDLASS_DATA/{task.source.file}", task.source.licence,
        ]
        for task in found
    ]  # fmt: skip
    console().print(table("", ("task", "category", "what", "data", "looked for at", "licence"), lines))
