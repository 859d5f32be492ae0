"""Results as logs of inspect (inspect_ai), written by its own package so that its viewer reads them. Needs inspect_ai."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from windlass.errors import BadInput
from windlass.tasks.evaluate.report.report import ModelRun, Report
from windlass.tasks.evaluate.report.results import Result
from windlass.tasks.evaluate.run.items import Prepared
from windlass.tasks.evaluate.run.records import Record
from windlass.tasks.evaluate.tasks.questions import Question


def write_inspect_logs(report: Report, runs: Sequence[ModelRun], folder: Path, created: str) -> list[Path]:
    """One `.eval` file for each model and task. `created`: ISO time."""
    if find_spec("inspect_ai") is None:
        raise BadInput("--export inspect needs the package inspect-ai, which is not installed: pip install inspect-ai")
    log, model, scorer = (import_module(f"inspect_ai.{name}") for name in ("log", "model", "scorer"))
    written: list[Path] = []
    for run in runs:
        for one in run.prepared:
            found = next(each for each in report.results if (each.model, each.task) == (run.model, one.task.name))
            records = [record for record in run.ordered() if record.task == one.task.name]
            made = _log(log, model, scorer, run, one, found, records, created)
            path = folder / f"{run.model}_{one.task.name}.eval"
            log.write_eval_log(made, str(path))
            written.append(path)
    return written


def _log(
    log: Any, model: Any, scorer: Any, run: ModelRun, one: Prepared, found: Result, records: Sequence[Record], created: str
) -> Any:
    questions = {question.id: question for question in one.questions}
    error = (found.interval[1] - found.interval[0]) / (2 * 1.96)
    metrics = {
        "accuracy": log.EvalMetric(name="accuracy", value=found.accuracy or 0.0),
        "stderr": log.EvalMetric(name="stderr", value=error),
    }
    spec = log.EvalSpec(
        created=created,
        task=one.task.name,
        dataset=log.EvalDataset(name=one.task.title or one.task.name, samples=found.num_examples),
        model=f"windlass/{run.model}",
        config=log.EvalConfig(epochs=run.settings.samples),
    )
    samples = [
        _sample(log, model, scorer, run.model, questions[record.id], record) for record in records if record.verdict != "failed"
    ]
    scores = [log.EvalScore(name=one.task.grader, scorer=one.task.grader, metrics=metrics)]
    results = log.EvalResults(total_samples=len(records), completed_samples=len(samples), scores=scores)
    return log.EvalLog(status="success", eval=spec, results=results, samples=samples)


def _sample(log: Any, model: Any, scorer: Any, name: str, question: Question, record: Record) -> Any:
    usage = model.ModelUsage(
        input_tokens=record.tokens.prompt,
        output_tokens=record.tokens.answer,
        total_tokens=record.tokens.prompt + record.tokens.answer,
    )
    output = model.ModelOutput.from_content(name, record.answer, stop_reason="max_tokens" if record.is_truncated else "stop")
    output.usage = usage
    value = {"correct": "C", "wrong": "I"}.get(record.verdict, "N")
    score = scorer.Score(value=value, answer=record.flexible, explanation=record.why)
    return log.EvalSample(
        id=record.id,
        epoch=record.sample + 1,
        input=question.text,
        target=question.answer,
        output=output,
        scores={"windlass": score},
    )
