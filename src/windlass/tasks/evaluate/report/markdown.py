"""The report as Markdown. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from windlass.core.statistics.intervals import show_interval, show_percent, show_points
from windlass.tasks.evaluate.report.report import Report
from windlass.tasks.evaluate.report.results import Result


def markdown(report: Report) -> str:
    parts = ["# Evaluation", _results(report.results), _categories(report), _pass_at(report.results), _comparisons(report)]
    parts += [_subjects(one) for one in report.results if len(one.subjects) > 1]
    return "\n\n".join(part for part in [*parts, _how(report)] if part) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def accuracy(one: Result) -> str:
    return "none yet" if one.accuracy is None else show_percent(one.accuracy, one.interval)


def _share(value: float | None, one: Result) -> str:
    return "" if value is None else show_percent(value, one.interval)


def _results(results: Sequence[Result]) -> str:
    rows = [
        [
            one.model, one.task, one.category, f"{one.num_examples:,}", accuracy(one), show_interval(one.interval),
            _share(one.strict_accuracy, one), _share(one.flexible_accuracy, one), f"{one.num_truncated:,}", f"{one.num_failed_requests:,}",
        ]
        for one in results
    ]  # fmt: skip
    header = ["model", "task", "category", "questions", "accuracy", "95 %", "strict", "flexible", "truncated", "failed requests"]
    notes = [
        f"{one.model}, {one.task}: {one.num_failed_requests:,} requests failed, most often: {one.failure[:200]}"
        for one in results
        if one.num_failed_requests
    ]
    notes += [f"{one.model}, {one.task}: {one.num_pending:,} programs were not run." for one in results if one.num_pending] + [
        f"{one.model}, {one.task}: {one.num_not_asked:,} questions were not asked." for one in results if one.num_not_asked
    ]
    return "\n\n".join([table(header, rows), *notes])


def _categories(report: Report) -> str:
    rows = [[one.model, one.category, ", ".join(one.tasks), f"{100 * one.accuracy:.0f} %"] for one in report.categories]
    return f"## By category\n\n{table(['model', 'category', 'tasks', 'mean accuracy'], rows)}" if rows else ""


def _pass_at(results: Sequence[Result]) -> str:
    rows = [
        [one.model, one.task, ", ".join(f"pass@{k} {_share(value, one)}" for k, value in one.pass_at.items())]
        for one in results
        if one.num_samples > 1
    ]
    return f"## pass@k\n\n{table(['model', 'task', 'unbiased'], rows)}" if rows else ""


def _comparisons(report: Report) -> str:
    if not report.comparisons:
        return ""
    rows = [
        [
            f"{one.b} over {one.a}", one.task, f"{one.num_questions:,}", show_points(one.difference, one.interval),
            show_interval(one.interval), f"{one.p:.2g}", f"{100 * one.smallest_detectable:.1f}",
        ]
        for one in report.comparisons
    ]  # fmt: skip
    header = ["difference of", "task", "questions", "points", "95 %", "p", "smallest that would show"]
    return f"## Compared on the same questions\n\n{table(header, rows)}"


def _subjects(one: Result) -> str:
    rows = [
        [each.subject, f"{each.num_examples:,}", show_percent(each.accuracy or 0.0, each.interval), show_interval(each.interval)]
        for each in one.subjects
    ]
    clustered = f" For other subjects than these: {show_interval(one.interval_by_subject)} %." if one.interval_by_subject else ""
    head = f"## {one.model}, {one.task}, by subject\n\nFor other questions of these subjects: {show_interval(one.interval)} %."
    return f"{head}{clustered}\n\n{table(['subject', 'questions', 'accuracy', '95 %'], rows)}"


def _how(report: Report) -> str:
    rows = [
        [
            note.task, note.style, str(note.shots), note.scored, note.data_sha256,
            "as pinned" if note.is_pinned else "another revision", note.licence,
        ]
        for note in report.tasks
    ]  # fmt: skip
    header = ["task", "prompt", "shots", "scored", "data", "revision", "licence"]
    lines = [f"- {one.model}: {_sampling(one.samples, one.temperature, one.seed)}" for one in report.settings]
    lines += [f"- Programs ran in a sandbox: {report.sandbox}."] if report.sandbox else []
    return "\n".join(["## How it was asked", "", table(header, rows), "", *lines])


def _sampling(samples: int, temperature: float, seed: int) -> str:
    if temperature == 0:
        return "greedy"
    return f"{samples} sample{'s' if samples > 1 else ''} at temperature {temperature:g}, seed {seed}"
