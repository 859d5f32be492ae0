"""Whether an answer is right. Pure; programs are put together here and run elsewhere (windlass.tasks.evaluate.sandbox)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation

from windlass.core.model import Frozen
from windlass.tasks.evaluate.tasks.questions import Question
from windlass.tasks.evaluate.tasks.task import Task

SHOWN = 80


class Verdict(Frozen):
    passed: bool
    why: str


def grade(task: Task, question: Question, extracted: str | None, is_strict: bool) -> Verdict:
    """Of every grader but `python` and `choice`."""
    if extracted is None:
        return Verdict(passed=False, why="no answer found")
    match task.grader:
        case "number":
            return _number(extracted, question.answer)
        case "letter":
            return _same(extracted.strip(), question.answer.strip())
        case _:
            return _same(extracted.strip(), question.answer.strip()) if is_strict else _loosely(extracted, question.answer)


def grade_choice(logprobs: Mapping[str, float], answer: str) -> Verdict:
    """The most likely choice; of equal ones the first."""
    best = max(logprobs, key=lambda choice: logprobs[choice])
    return _same(best.strip(), answer.strip())


def value_of(text: str) -> Decimal | None:
    """`$1,800.00` -> 1800. None: no number."""
    try:
        return Decimal(re.sub(r"[,$%\s]", "", text).rstrip("."))
    except InvalidOperation:
        return None


def _number(found: str, wanted: str) -> Verdict:
    value, target = value_of(found), value_of(wanted)
    if value is None:
        return Verdict(passed=False, why=f"{found[:SHOWN]!r} is no number")
    return Verdict(passed=value == target, why=f"{value} is right" if value == target else f"{value} instead of {wanted}")


def _same(found: str, wanted: str) -> Verdict:
    why = "the same" if found == wanted else f"{found[:SHOWN]!r} instead of {wanted[:SHOWN]!r}"
    return Verdict(passed=found == wanted, why=why)


def _loosely(found: str, wanted: str) -> Verdict:
    """Without case, surrounding punctuation and runs of blanks."""
    passed = _plain(found) == _plain(wanted)
    why = "the same but for case and punctuation" if passed else f"{found.strip()[:SHOWN]!r} instead of {wanted[:SHOWN]!r}"
    return Verdict(passed=passed, why="the same" if found.strip() == wanted.strip() else why)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .,;:!?\"'`*")


def program(question: Question, extracted: str) -> str:
    """The answer as a whole program: behind what it was asked to continue, if it defines nothing itself."""
    code = extracted.replace("\r\n", "\n")
    if not question.body_of:
        return code
    if re.search(r"^(?:async )?def |^class ", code, re.MULTILINE):
        return f"{question.body_of}\n\n{code}\n"
    return f"{question.body_of}{code}\n"
