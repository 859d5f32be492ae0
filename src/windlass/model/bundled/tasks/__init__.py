"""Generated tasks for very small models: arithmetic, lists, small Python functions, with answers.

Deterministic for a seed. A hash of the problem, not of its wording, decides whether it is for training or held out, so that no held-out
problem is ever trained on. Knows no tokens and no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from random import Random

from windlass.errors import UnknownName
from windlass.model.bundled.tasks import lists, numbers, python
from windlass.model.bundled.tasks.problem import Maker, Problem

MAKERS: dict[str, Maker] = {**numbers.MAKERS, **lists.MAKERS, **python.MAKERS}
SHARES = {
    "add": 16, "subtract": 16, "multiply": 9, "divide": 6, "compare": 4,
    "copy": 6, "reverse": 8, "spell": 6, "sort": 10, "count": 5, "pick": 4, "python": 16, "write": 4,
}  # fmt: skip
"""Relative frequency of tasks: hard ones more often."""
HELD_OUT = 0.02
"""Fraction of the problems of a task."""
_HELD_BELOW = int(HELD_OUT * 2**32)


def is_held_out(problem: Problem) -> bool:
    digest = blake2b(f"{problem.task}:{problem.key}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") < _HELD_BELOW


def draw(random: Random, task: str | None = None, *, held_out: bool = False) -> Problem:
    """One problem of the training or held-out split."""
    if task is not None and task not in MAKERS:
        raise UnknownName("task", task, MAKERS)
    name = task or random.choices(_NAMES, cum_weights=_UP_TO)[0]
    while is_held_out(problem := MAKERS[name](random)) != held_out:
        pass
    return problem


_NAMES = tuple(SHARES)
_UP_TO = tuple(sum(tuple(SHARES.values())[: place + 1]) for place in range(len(SHARES)))


def problems(seed: int, part: int, count: int) -> Iterator[Problem]:
    """Training problems. Different `part`s are independent, so that processes can generate them in parallel."""
    random = Random(_number(seed, "train", part))
    return (draw(random) for _ in range(count))


def held_out(count: int, seed: int = 0, tasks: Sequence[str] = _NAMES) -> list[Problem]:
    """`count` of each task, all different."""
    chosen: list[Problem] = []
    for task in tasks:
        random = Random(_number(seed, "held out", task))
        found: dict[str, Problem] = {}
        for _ in range(20 * count):  # a small task may not have that many
            problem = draw(random, task, held_out=True)
            found.setdefault(problem.key, problem)
            if len(found) == count:
                break
        chosen += found.values()
    return chosen


def _number(*parts: object) -> int:
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=16).digest(), "little")


def is_right(problem: Problem, answer: str) -> bool:
    """Exact match, except for surrounding whitespace."""
    return answer.strip() == problem.answer


def accuracy(given: Sequence[Problem], answers: Sequence[str]) -> dict[str, tuple[int, int]]:
    """By task: (correct, total)."""
    counted: dict[str, tuple[int, int]] = {}
    for problem, answer in zip(given, answers, strict=True):
        right, total = counted.get(problem.task, (0, 0))
        counted[problem.task] = (right + is_right(problem, answer), total + 1)
    return counted
