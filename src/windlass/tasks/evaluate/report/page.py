"""The report as one HTML page that needs nothing else: scores, comparisons, and every example with filters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from windlass.tasks.evaluate.report.report import ModelRun, Report
from windlass.tasks.evaluate.report.results import Measured

MAX_SHOWN = 20_000
"""Characters of one text: an endless answer is cut, and says so."""


def page(report: Report, clock: Sequence[Measured], runs: Sequence[ModelRun]) -> bytes:
    """What clocks said stands in one line of its own, so that the rest is the same for the same answers."""
    before, _, rest = _template().partition(b"@REPORT@")
    between, _, after = rest.partition(b"@MEASURED@")  # before answers are put in: they may hold these words
    shown = _embedded({"report": report, **examples(runs)})
    measured = _embedded({"tasks": list(clock), "seconds": _seconds(runs)})
    return b"".join((before, shown, between, measured, after))


def examples(runs: Sequence[ModelRun]) -> dict[str, Any]:
    """Prompts are kept once, however many models and samples answered them."""
    prompts: dict[str, int] = {}
    rows: list[dict[str, Any]] = []
    for run in runs:
        questions = {(one.task.name, question.id): question for one in run.prepared for question in one.questions}
        for record in run.ordered():
            question = questions[record.task, record.id]
            place = prompts.setdefault(_cut(question.text), len(prompts))
            rows.append(
                {
                    "model": run.model, "task": record.task, "id": record.id, "sample": record.sample, "subject": record.subject,
                    "prompt": place, "expected": _cut(question.answer or question.tests), "answer": _cut(record.answer),
                    "reasoning": _cut(record.reasoning), "strict": record.strict, "flexible": record.flexible, "verdict": record.verdict,
                    "why": record.why, "truncated": record.is_truncated, "choices": record.choices,
                    "tokens": [record.tokens.prompt, record.tokens.answer],
                }
            )  # fmt: skip
    return {"prompts": list(prompts), "examples": rows}


def _seconds(runs: Sequence[ModelRun]) -> list[float]:
    """In the order of the examples."""
    return [round(record.seconds, 3) for run in runs for record in run.ordered()]


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}\n[cut: {len(text):,} characters]"


def _embedded(value: Any) -> bytes:
    """JSON that cannot end the script element it stands in."""
    return (
        msgspec.json.encode(value)
        .replace(b"<", b"\\u003c")
        .replace(b"\xe2\x80\xa8", b"\\u2028")
        .replace(b"\xe2\x80\xa9", b"\\u2029")
    )


@cache
def _template() -> bytes:
    return Path(__file__).with_name("page.html").read_bytes()
