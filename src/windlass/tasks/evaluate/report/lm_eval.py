"""Results in lm-evaluation-harness's layout (`results_TIME.json`, `samples_TASK_TIME.jsonl`), for tools that read those. Pure."""

from __future__ import annotations

import json
from typing import Any

from windlass.tasks.evaluate.report.report import ModelRun, Report
from windlass.tasks.evaluate.report.results import Result
from windlass.tasks.evaluate.run.records import Record
from windlass.tasks.evaluate.tasks.questions import Question

FILTERS = {"strict": "strict-match", "flexible": "flexible-extract"}
"""The names that its own tasks use."""


def lm_eval_files(report: Report, runs: list[ModelRun], time: str, version: str) -> dict[str, bytes]:
    """By path: a folder for each model, as the harness makes them. `time`: `2026-11-16T06-00-00`."""
    made: dict[str, bytes] = {}
    for run in runs:
        results = [one for one in report.results if one.model == run.model]
        made[f"{run.model}/results_{time}.json"] = _encode(results_of(run, results, version))
        for one in run.prepared:
            questions = {question.id: question for question in one.questions}
            lines = [
                json.dumps(sample_of(record, questions[record.id], number), ensure_ascii=False)
                for number, record in enumerate(record for record in run.ordered() if record.task == one.task.name)
            ]
            made[f"{run.model}/samples_{one.task.name}_{time}.jsonl"] = "".join(f"{line}\n" for line in lines).encode()
    return made


def results_of(run: ModelRun, results: list[Result], version: str) -> dict[str, Any]:
    return {
        "results": {one.task: _metrics(one) for one in results},
        "group_subtasks": {one.task: [] for one in results},
        "configs": {one.task.name: _config(one) for one in run.prepared},
        "versions": {one.task: 1 for one in results},
        "n-shot": {one.name: one.shots for one in run.settings.tasks},
        "higher_is_better": {one.task: {_metric(one): True} for one in results},
        "n-samples": {
            one.task: {"original": one.num_examples + one.num_not_asked, "effective": one.num_examples} for one in results
        },
        "config": {"model": "windlass", "model_args": f"model={run.model}", "limit": run.settings.num_examples},
        "model_name": run.model,
        "model_source": "windlass",
        "windlass_version": version,
    }


def _metric(one: Result) -> str:
    return "acc" if one.strict_accuracy == one.flexible_accuracy == one.accuracy and one.subjects else "exact_match"


def _metrics(one: Result) -> dict[str, Any]:
    """A standard error from the interval's half width: its own is of the same mean."""
    error = (one.interval[1] - one.interval[0]) / (2 * 1.96)
    name = _metric(one)
    if name == "acc":
        return {"alias": one.task, "acc,none": one.accuracy, "acc_stderr,none": error}
    found: dict[str, Any] = {"alias": one.task}
    for key, label in FILTERS.items():
        found[f"{name},{label}"] = getattr(one, f"{key}_accuracy")
        found[f"{name}_stderr,{label}"] = error
    return found | {f"pass@{k},none": value for k, value in one.pass_at.items() if one.num_samples > 1}


def _config(one: Any) -> dict[str, Any]:
    task = one.task
    return {
        "task": task.name,
        "dataset_path": task.source.url or task.source.file,
        "output_type": "multiple_choice" if task.grader == "choice" else "generate_until",
        "doc_to_text": task.prompt.completion or task.prompt.chat,
        "doc_to_target": task.answer,
        "num_fewshot": one.settings.shots,
        "metadata": {"version": 1, "data_sha256": one.settings.data},
    }


def sample_of(record: Record, question: Question, number: int) -> dict[str, Any]:
    choices = [[[value, False]] for value in record.choices.values()]
    passed = float(record.verdict == "correct")
    return {
        "doc_id": number,
        "doc": {"id": record.id, "subject": record.subject, "sample": record.sample},
        "target": question.answer,
        "arguments": [[question.text, choice] for choice in record.choices] or [[question.text]],
        "resps": choices or [[record.answer]],
        "filtered_resps": [value for [value] in choices] or [record.flexible if record.flexible is not None else "[invalid]"],
        "filter": "none" if choices else FILTERS["flexible"],
        "metrics": ["acc" if choices else "exact_match"],
        "acc" if choices else "exact_match": passed,
        "doc_hash": "",
        "prompt_hash": record.prompt,
        "target_hash": "",
    }


def _encode(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
