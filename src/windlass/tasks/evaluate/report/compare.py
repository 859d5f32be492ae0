"""Models compared on the same questions. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean

from windlass.core.model import Frozen
from windlass.core.statistics.intervals import Interval, paired
from windlass.tasks.evaluate.run.records import Record


class Comparison(Frozen):
    a: str
    b: str
    task: str
    num_questions: int
    """That both answered, from the same prompt or not."""
    difference: float
    """b's accuracy less a's."""
    interval: Interval
    p: float
    smallest_detectable: float
    same_prompts: bool


def compare(runs: Mapping[str, Sequence[Record]]) -> list[Comparison]:
    """Every pair of models, task by task. `runs`: records by model."""
    scored = {model: _scores(records) for model, records in runs.items()}
    found: list[Comparison] = []
    for a, b in combinations(runs, 2):
        for task in scored[a].keys() & scored[b].keys():
            one = _pair(a, b, task, scored[a][task], scored[b][task])
            if one is not None:
                found.append(one)
    order = [record.task for records in runs.values() for record in records]
    return sorted(found, key=lambda one: (list(runs).index(one.a), list(runs).index(one.b), order.index(one.task)))


class _Question(Frozen):
    score: float
    prompts: frozenset[str]


def _scores(records: Sequence[Record]) -> dict[str, dict[str, _Question]]:
    """task -> id -> mean over samples."""
    grouped: defaultdict[str, defaultdict[str, list[Record]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record.verdict in ("correct", "wrong"):
            grouped[record.task][record.id].append(record)
    return {
        task: {
            id: _Question(
                score=fmean(float(record.verdict == "correct") for record in some),
                prompts=frozenset(record.prompt for record in some),
            )
            for id, some in questions.items()
        }
        for task, questions in grouped.items()
    }


def _pair(a: str, b: str, task: str, left: Mapping[str, _Question], right: Mapping[str, _Question]) -> Comparison | None:
    shared = sorted(left.keys() & right.keys())
    if not shared:
        return None
    found = paired([left[id].score for id in shared], [right[id].score for id in shared])
    return Comparison(
        a=a,
        b=b,
        task=task,
        num_questions=found.num_questions,
        difference=found.difference,
        interval=found.interval,
        p=found.p,
        smallest_detectable=found.smallest_detectable,
        same_prompts=all(left[id].prompts == right[id].prompts for id in shared),
    )
