"""Records to results: one row for each model and task, and for each category. Pure.

`Result` holds what follows from the answers alone, so a run that was killed and resumed has the same, to the byte. What a clock or a meter
said is in `Measured`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import msgspec

from windlass.core.hardware.energy import co2_kg, energy_kwh, grid
from windlass.core.model import Frozen
from windlass.core.statistics.intervals import Interval, clustered, pass_at_k, wilson
from windlass.tasks.evaluate.run.budget import Price
from windlass.tasks.evaluate.run.records import Record
from windlass.tasks.evaluate.tasks.task import Task

JOULES_PER_KWH = 3.6e6
PASS_AT = (1, 2, 5, 10, 20, 50, 100)


class SubjectResult(Frozen):
    subject: str
    num_examples: int
    num_correct: int
    accuracy: float | None
    interval: Interval


class TokenCounts(Frozen):
    prompt: int
    answer: int


class Result(Frozen):
    model: str
    task: str
    category: str
    num_examples: int
    """Questions asked; with several samples each counts once."""
    num_samples: int
    num_answers: int
    """num_correct + num_wrong + num_pending; with num_failed_requests, all requests."""
    num_correct: int
    num_wrong: int
    num_pending: int
    """Programs that were not run."""
    num_failed_requests: int
    failure: str
    """The commonest reason of failed requests; empty without any."""
    num_truncated: int
    num_not_asked: int
    """For lack of budget."""
    accuracy: float | None
    """Of answers with a verdict; None without any."""
    interval: Interval
    """95 %: for other questions like these."""
    interval_by_subject: Interval | None
    """95 %, clustered: for other subjects too."""
    strict_accuracy: float | None
    flexible_accuracy: float | None
    pass_at: dict[str, float]
    tokens: TokenCounts
    subjects: tuple[SubjectResult, ...] = ()


class Measured(Frozen):
    model: str
    task: str
    seconds: float
    joules: float | None
    kg_co2: float | None
    usd: float | None
    answer_seconds_median: float
    answer_seconds_p95: float
    per_answer: dict[str, float | None]
    per_correct: dict[str, float | None]


def result(model: str, task: Task, records: Sequence[Record], num_questions: int, samples: int) -> Result:
    graded = [record for record in records if record.verdict in ("correct", "wrong")]
    count = {name: sum(record.verdict == name for record in records) for name in ("correct", "wrong", "failed", "pending")}
    scores = [float(record.verdict == "correct") for record in graded]
    return Result(
        model=model,
        task=task.name,
        category=task.category,
        num_examples=len({record.id for record in records}),
        num_samples=samples,
        num_answers=len(records) - count["failed"],
        num_correct=count["correct"],
        num_wrong=count["wrong"],
        num_pending=count["pending"],
        num_failed_requests=count["failed"],
        failure=_commonest([record.why for record in records if record.verdict == "failed"]),
        num_truncated=sum(record.is_truncated for record in records),
        num_not_asked=num_questions * samples - len(records),
        accuracy=fmean(scores) if scores else None,
        interval=_interval(scores, [record.id for record in graded]),
        interval_by_subject=clustered(scores, [record.subject for record in graded]) if task.subject and scores else None,
        strict_accuracy=_share([record.strict_passed for record in graded]),
        flexible_accuracy=_share([record.flexible_passed for record in graded]),
        pass_at=pass_at(graded, samples),
        tokens=TokenCounts(
            prompt=sum(record.tokens.prompt for record in records), answer=sum(record.tokens.answer for record in records)
        ),
        subjects=tuple(_subjects(graded)) if task.subject else (),
    )


def _commonest(reasons: Sequence[str]) -> str:
    """Of equally common ones the first by alphabet, so that the order of answers does not matter."""
    return min(reasons, key=lambda reason: (-reasons.count(reason), reason), default="")


def _share(passed: Sequence[bool | None]) -> float | None:
    known = [float(value) for value in passed if value is not None]
    return fmean(known) if known else None


def _interval(scores: Sequence[float], ids: Sequence[str]) -> Interval:
    """Samples of one question are not independent: clustered by question, unless each was asked once."""
    if len(set(ids)) < len(ids):
        return clustered(scores, ids) or (0.0, 1.0)
    return wilson(int(sum(scores)), len(scores))


def pass_at(graded: Sequence[Record], samples: int) -> dict[str, float]:
    """Over questions that have all their samples."""
    by_question: defaultdict[str, list[bool]] = defaultdict(list)
    for record in graded:
        by_question[record.id].append(record.verdict == "correct")
    whole = [passed for passed in by_question.values() if len(passed) == samples]
    wanted = [k for k in PASS_AT if k <= samples]
    if samples not in wanted:
        wanted.append(samples)
    return {str(k): fmean(pass_at_k(samples, sum(passed), k) for passed in whole) for k in wanted if whole}


def _subjects(graded: Sequence[Record]) -> list[SubjectResult]:
    by_subject: defaultdict[str, list[Record]] = defaultdict(list)
    for record in graded:
        by_subject[record.subject].append(record)
    return [_subject(name, by_subject[name]) for name in sorted(by_subject)]


def _subject(name: str, records: Sequence[Record]) -> SubjectResult:
    scores = [float(record.verdict == "correct") for record in records]
    return SubjectResult(
        subject=name,
        num_examples=len({record.id for record in records}),
        num_correct=int(sum(scores)),
        accuracy=fmean(scores),
        interval=_interval(scores, [record.id for record in records]),
    )


def measured(model: str, task: str, records: Sequence[Record], price: Price, region: str) -> Measured:
    seconds = sum(record.wall_seconds for record in records)
    known = [record.joules for record in records if record.joules is not None]
    joules = sum(known) if known else None
    kg = None if joules is None else co2_kg(energy_kwh(1.0, joules / JOULES_PER_KWH * 1000), grid(region).grams_per_kwh)
    prompt, answer = sum(r.tokens.prompt for r in records), sum(r.tokens.answer for r in records)
    usd = price.usd(prompt, answer, seconds) if price.is_known else None
    times = sorted(record.seconds for record in records if record.verdict != "failed") or [0.0]
    totals = {"seconds": seconds, "joules": joules, "kg_co2": kg, "usd": usd}
    num_correct = sum(record.verdict == "correct" for record in records)
    return Measured(
        model=model,
        task=task,
        seconds=round(seconds, 3),
        joules=joules,
        kg_co2=kg,
        usd=usd,
        answer_seconds_median=times[len(times) // 2],
        answer_seconds_p95=times[int(0.95 * (len(times) - 1))],
        per_answer=_per(totals, len(times)),
        per_correct=_per(totals, num_correct),
    )


def _per(totals: Mapping[str, float | None], count: int) -> dict[str, float | None]:
    return {name: None if value is None or not count else value / count for name, value in totals.items()}


def merged(found: Result, clock: Measured) -> dict[str, Any]:
    """A row of `--json`."""
    row: dict[str, Any] = msgspec.to_builtins(found)
    extra: dict[str, Any] = msgspec.to_builtins(clock)
    return {**row, **{key: value for key, value in extra.items() if key not in row}}


class CategoryResult(Frozen):
    model: str
    category: str
    tasks: tuple[str, ...]
    num_examples: int
    accuracy: float
    """The mean of its tasks' accuracies, however many questions each has."""


def categories(results: Sequence[Result]) -> list[CategoryResult]:
    grouped: defaultdict[tuple[str, str], list[Result]] = defaultdict(list)
    for one in results:
        if one.accuracy is not None:
            grouped[one.model, one.category].append(one)
    return [
        CategoryResult(
            model=model,
            category=category,
            tasks=tuple(one.task for one in some),
            num_examples=sum(one.num_examples for one in some),
            accuracy=fmean(one.accuracy or 0.0 for one in some),
        )
        for (model, category), some in grouped.items()
    ]
