"""Finds the answer in a model's text, strictly (as it was asked to be given) and flexibly (anywhere). Pure."""

from __future__ import annotations

import re

from windlass.core.model import Frozen
from windlass.tasks.evaluate.tasks.task import Finder, Task

NUMBER = r"-?\$?-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
"""1,234.5 with its sign; a full stop that ends a sentence is not part of it."""
_BLOCK = re.compile(r"```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:\n?```|\Z)", re.DOTALL)
_THOUGHT_END = "</think>"
_CODE_START = re.compile(r"^(?:def |class |import |from \w[\w.]* import |@|async def )", re.MULTILINE)
_LAST_LINES = re.compile(r"^(?:assert\b|print\(|if __name__|# ?(?:Test|Example))", re.MULTILINE)


class Found(Frozen):
    """What was found, or None."""

    strict: str | None
    flexible: str | None


_DEFAULTS: dict[str, tuple[Finder, Finder]] = {
    "exact": (Finder(find="whole"), Finder(find="whole")),
    "number": (
        Finder(pattern=rf"(?:####|[Aa]nswer is:?|[Aa]nswer:)\s*\**\s*({NUMBER})"),
        Finder(pattern=f"({NUMBER})"),
    ),
    "letter": (
        Finder(pattern=r"\A\s*[*(]*([A-Z])[*)]*[.:]?\s*(?:\Z|\n)|[Aa]nswer(?: is)?:?\s*[*(]*([A-Z])(?![A-Za-z'])"),
        Finder(find="letter"),
    ),
    "choice": (Finder(find="whole"), Finder(find="whole")),
    "python": (Finder(find="code_block"), Finder(find="code")),
}


def extract(task: Task, answer: str, style: str) -> Found:
    text = without_thought(answer)
    strict, flexible = _DEFAULTS[task.grader]
    if task.grader == "python" and style == "completion":
        strict = Finder(find="whole")  # a continuation is code as it is
    strict, flexible = task.extract.strict or strict, task.extract.flexible or flexible
    return Found(strict=find(strict, text, task), flexible=find(flexible, text, task))


def without_thought(text: str) -> str:
    """Of servers that leave reasoning in the text."""
    return text.rpartition(_THOUGHT_END)[2] if _THOUGHT_END in text else text


def find(finder: Finder, text: str, task: Task) -> str | None:
    match finder.find:
        case "whole":
            return text
        case "pattern":
            return _pattern(finder, text)
        case "letter":
            return _letter(text, task.choices)
        case "code_block":
            return _first_block(text)
        case "code":
            return _any_code(text)


def _pattern(finder: Finder, text: str) -> str | None:
    found = [next((group for group in match.groups() if group is not None), "") for match in re.finditer(finder.pattern, text)]
    return None if not found else found[0 if finder.take == "first" else -1]


def _letter(text: str, letters: tuple[str, ...]) -> str | None:
    """The one that it calls its answer, else the first that stands alone. `A` begins sentences, so not before a small letter."""
    known = "".join(letter.strip() for letter in letters)
    said = re.findall(rf"(?i:answer|option|choice)(?:\s+(?:is|would be))?\s*:?\s*[*(\"']*([{known}])(?![A-Za-z'])", text)
    if said:
        return said[-1]
    alone = re.search(rf"(?<![A-Za-z'])([{known}])(?![A-Za-z']| [a-z])", text)
    return alone[1] if alone else None


def _blocks(text: str) -> list[str]:
    return [match[2] for match in _BLOCK.finditer(text)]


def _first_block(text: str) -> str | None:
    return next(iter(_blocks(text)), None)


def _any_code(text: str) -> str | None:
    """All blocks that define something, else the first block, else from the first line that begins code, else everything."""
    blocks = _blocks(text)
    defining = [block for block in blocks if _CODE_START.search(block)]
    if blocks:
        return "\n\n".join(defining) or blocks[0]
    begin = _CODE_START.search(text)
    if begin is None:
        return text
    code = text[begin.start() :]
    end = _LAST_LINES.search(code)
    return code[: end.start()] if end else code
