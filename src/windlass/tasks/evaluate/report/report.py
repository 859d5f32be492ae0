"""Everything a report says, as one value. How it is shown is decided in the other modules of this room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from windlass.core.model import Frozen
from windlass.tasks.evaluate.report.compare import Comparison, compare
from windlass.tasks.evaluate.report.results import CategoryResult, Measured, Result, categories, measured, merged, result
from windlass.tasks.evaluate.run.budget import Price
from windlass.tasks.evaluate.run.items import Prepared
from windlass.tasks.evaluate.run.records import Record
from windlass.tasks.evaluate.run.settings import Settings


class TaskNote(Frozen):
    """How a task was asked, and of what."""

    task: str
    title: str
    category: str
    style: str
    shots: int
    scored: str
    num_questions: int
    licence: str
    url: str
    data_sha256: str
    is_pinned: bool


class ModelRun(Frozen):
    """One model's part."""

    settings: Settings
    prepared: tuple[Prepared, ...]
    records: Mapping[str, Record]
    sandbox: str = ""
    """What isolated programs; empty: none were run."""
    price: Price = Price()

    @property
    def model(self) -> str:
        return self.settings.model

    def ordered(self) -> list[Record]:
        """In the order of the questions, not of the answers."""
        found: list[Record] = []
        for one in self.prepared:
            by_id: dict[str, list[Record]] = {}
            for record in self.records.values():
                if record.task == one.task.name:
                    by_id.setdefault(record.id, []).append(record)
            for question in one.questions:
                found += sorted(by_id.get(question.id, []), key=lambda record: record.sample)
        return found


class Report(Frozen):
    results: tuple[Result, ...]
    categories: tuple[CategoryResult, ...]
    comparisons: tuple[Comparison, ...]
    tasks: tuple[TaskNote, ...]
    settings: tuple[Settings, ...]
    sandbox: str = ""


def build(runs: Sequence[ModelRun]) -> Report:
    results: list[Result] = []
    for run in runs:
        for one in run.prepared:
            records = [record for record in run.ordered() if record.task == one.task.name]
            results.append(result(run.model, one.task, records, len(one.questions), run.settings.samples))
    notes = {one.task.name: _note(one) for run in runs for one in run.prepared}
    return Report(
        results=tuple(results),
        categories=tuple(categories(results)),
        comparisons=tuple(compare({run.model: run.ordered() for run in runs})),
        tasks=tuple(notes.values()),
        settings=tuple(run.settings for run in runs),
        sandbox=next((run.sandbox for run in runs if run.sandbox), ""),
    )


def _note(one: Prepared) -> TaskNote:
    return TaskNote(
        task=one.task.name,
        title=one.task.title or one.task.name,
        category=one.task.category,
        style=one.settings.style,
        shots=one.settings.shots,
        scored=one.task.extract.scored,
        num_questions=len(one.questions),
        licence=one.task.source.licence,
        url=one.task.source.url,
        data_sha256=one.settings.data,
        is_pinned=one.is_pinned,
    )


def measure(runs: Sequence[ModelRun], region: str) -> list[Measured]:
    return [
        measured(run.model, one.task.name, [r for r in run.ordered() if r.task == one.task.name], run.price, region)
        for run in runs
        for one in run.prepared
    ]


def as_json(report: Report, clock: Sequence[Measured], journals: Mapping[str, Path]) -> dict[str, Any]:
    """What `--json` prints. Its keys are stable."""
    rows = [merged(one, times) for one, times in zip(report.results, clock, strict=True)]
    return {
        "results": rows,
        "categories": msgspec.to_builtins(report.categories),
        "comparisons": msgspec.to_builtins(report.comparisons),
        "journal": {model: str(path) for model, path in journals.items()},
    }
