"""Tables of answers: JSONL with one answer a line, or CSV with one prompt a line and a column for each model (as RouteLLM's).

Journals of `windlass eval` become the same `Answer`s in `cli/route/journals.py`, because they need their tasks for the prompts.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from sys import intern

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.core.model import Frozen
from windlass.errors import BadInput

YES, NO = ("true", "yes", "1", "1.0"), ("false", "no", "0", "0.0")
MAX_SHOWN = 60


class Answer(Frozen):
    """One model's answer to one prompt."""

    prompt: str
    model: str
    score: float
    """0 wrong, 1 right, or between."""
    id: str = ""
    """Of the prompt; empty: its text."""
    group: str = ""
    """Where the prompt comes from: a task, a subject, a customer. Prompts of one group resemble each other."""
    cost: float | None = None
    seconds: float | None = None
    joules: float | None = None
    prompt_tokens: int = 0
    answer_tokens: int = 0
    confidence: dict[str, float] = {}
    """Of the model in its own answer, as `decide/confidence.py` computes it from token log-probabilities."""

    def __post_init__(self) -> None:
        if not self.prompt.strip() or not self.model.strip():
            raise BadInput("an answer needs a prompt and a model")
        if not (math.isfinite(self.score) and 0.0 <= self.score <= 1.0):
            raise BadInput(f"the score is {self.score:g}; it should be between 0 (wrong) and 1 (right)")
        for name in ("cost", "seconds", "joules"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise BadInput(f"{name} is {value:g}; it should be at least 0")


class _Line(msgspec.Struct):
    """As people write it: an id may be a number, a score true or false; further keys are theirs."""

    prompt: str
    model: str
    score: float | bool
    id: str | int = ""
    group: str = ""
    cost: float | None = None
    seconds: float | None = None
    joules: float | None = None
    prompt_tokens: int = 0
    answer_tokens: int = 0
    confidence: dict[str, float] = {}


_DECODER = msgspec.json.Decoder(_Line)


def read_jsonl(lines: Iterable[bytes], where: str) -> Iterator[Answer]:
    known: dict[str, str] = {}  # a prompt is in memory once, however many models answered it
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            if _is_unscored(line):
                continue
            found = _DECODER.decode(line)
            yield Answer(
                prompt=known.setdefault(found.prompt, found.prompt), model=intern(found.model), score=float(found.score),
                id=str(found.id), group=intern(found.group),
                cost=found.cost, seconds=found.seconds, joules=found.joules, prompt_tokens=found.prompt_tokens,
                answer_tokens=found.answer_tokens, confidence=found.confidence,
            )  # fmt: skip
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, BadInput) as error:
            wanted = 'a line is like {"prompt": "...", "model": "small", "score": 1, "group": "maths"}'
            raise BadInput(f"{where}, line {number}: {error}; {wanted}") from None


class _LogLine(msgspec.Struct):
    decision: str | None = None
    score: float | None = None
    prompt: str | None = None


_LOG_LINES = msgspec.json.Decoder(_LogLine)


def _is_unscored(line: bytes) -> bool:
    """A line of a router's log without a score, or without its prompt: nothing to learn from."""
    if b'"decision"' not in line:
        return False
    try:
        found = _LOG_LINES.decode(line)
    except DECODE_ERRORS:
        return False
    return found.decision is not None and (found.score is None or found.prompt is None)


def read_wide_csv(lines: Iterable[str], where: str, group: str) -> Iterator[Answer]:
    """A column `prompt`, then one column for each model with its score; a column `group` is optional."""
    reader = csv.reader(lines)
    head = next(reader, [])
    if "prompt" not in head or len(head) < 3:
        raise BadInput(f"{where}: the first line should name a column `prompt` and a column for each of two models or more")
    models = [(place, name) for place, name in enumerate(head) if name not in ("prompt", "group", "id") and name]
    prompt_at, group_at = head.index("prompt"), head.index("group") if "group" in head else None
    for number, row in enumerate(reader, 2):
        if len(row) != len(head):
            raise BadInput(f"{where}, row {number}: {len(row)} columns, not the {len(head)} of the first line")
        source = group if group_at is None else intern(row[group_at])
        id = f"{group}:{number}"
        for place, model in models:
            if row[place].strip():
                score = _score(row[place], f"{where}, row {number}, column {model}")
                yield Answer(prompt=row[prompt_at], model=model, score=score, group=source, id=id)


def _score(text: str, where: str) -> float:
    word = text.strip().lower()
    if word in YES or word in NO:
        return float(word in YES)
    try:
        found = float(word)
    except ValueError:
        raise BadInput(f"{where}: {text[:MAX_SHOWN]!r} is not a score; use true, false, or a number from 0 to 1") from None
    if not 0.0 <= found <= 1.0:
        raise BadInput(f"{where}: the score is {found:g}; it should be between 0 and 1")
    return found


def read_file(path: Path) -> list[Answer]:
    """By its suffix. A group that a CSV file does not name is the file itself."""
    try:
        if path.suffix == ".csv":
            with path.open(newline="", encoding="utf-8") as stream:
                return list(read_wide_csv(stream, str(path), path.stem))
        with path.open("rb") as stream:
            return list(read_jsonl(stream, str(path)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def read_paths(paths: Sequence[Path]) -> list[Answer]:
    """Files, and folders of .csv and .jsonl files."""
    found: list[Answer] = []
    for path in paths:
        if path.is_dir():
            inside = sorted([*path.glob("*.csv"), *path.glob("*.jsonl")])
            if not inside:
                raise BadInput(f"{path} has neither a journal of `windlass eval` nor .csv or .jsonl files")
            found += [answer for one in inside for answer in read_file(one)]
        else:
            found += read_file(path)
    return found
