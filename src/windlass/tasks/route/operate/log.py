"""The log of decisions, one JSON object a line: everything a decision depended on, so that it can be replayed to the same one.

With `log_prompts`, lines that have a score (a check passed or failed) are a table of answers as they stand: `route fit` reads them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.core.model import Frozen
from windlass.errors import BadInput
from windlass.tasks.route.decide.policy import Decision, Situation, decide


class Attempt(Frozen):
    model: str
    outcome: str
    """`kept`, `passed on`, or what went wrong."""
    seconds: float = 0.0


class LogLine(Frozen):
    time: float
    variant: str
    decision: str
    """`decided`, `sticky`, `cached`, `named` or `shadow`."""
    model: str
    """That answered; empty: none did."""
    reason: str
    situation: Situation | None = None
    chosen: str = ""
    """By the decision; another one may have answered."""
    attempts: tuple[Attempt, ...] = ()
    confidence: float | None = None
    prompt_tokens: int = 0
    answer_tokens: int = 0
    seconds: float = 0.0
    cost: float = 0.0
    grams: float | None = None
    prompt: str | None = None
    score: float | None = None
    """1 or 0 where a check could tell."""
    error: str = ""


_ENCODER = msgspec.json.Encoder()


class DecisionLog:
    """Appends whole lines; without a path it only counts."""

    def __init__(self, path: Path | None) -> None:
        self._descriptor = -1
        self.num_lost = 0
        if path is not None:
            try:
                self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            except OSError as error:
                raise BadInput(f"the log {path} cannot be written: {error.strerror}") from None

    def add(self, line: LogLine) -> None:
        """A full disk must not stop answers: lines that cannot be written are counted."""
        if self._descriptor < 0:
            return
        try:
            os.write(self._descriptor, _ENCODER.encode(_without_none(line)) + b"\n")
        except OSError:
            self.num_lost += 1

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _without_none(line: LogLine) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(line)
    return {key: value for key, value in found.items() if value is not None}


class Replayed(Frozen):
    num_decisions: int
    num_same: int
    first_difference: str = ""


def replay(lines: Iterable[bytes], where: str) -> Replayed:
    """Every logged decision, made again."""
    count, same, difference = 0, 0, ""
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        try:
            line = msgspec.json.decode(raw, type=LogLine)
        except DECODE_ERRORS as error:
            raise BadInput(f"{where}, line {number} is not a line of a router's log: {error}") from None
        if line.situation is None:
            continue
        count += 1
        again: Decision = decide(line.situation)
        if (again.model, again.reason) == (line.chosen, line.reason):
            same += 1
        elif not difference:
            difference = f"line {number}: {line.chosen} ({line.reason}), now {again.model} ({again.reason})"
    return Replayed(num_decisions=count, num_same=same, first_difference=difference)
