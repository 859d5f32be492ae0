"""One line of the journal: a question asked once, what came back, and the verdict. Values only."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec

VerdictName = Literal["correct", "wrong", "failed", "pending"]
"""failed: no answer after all attempts, so neither right nor wrong; pending: a program that has not been run."""


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    prompt: int = 0
    answer: int = 0
    cached: int = 0


class Record(msgspec.Struct, frozen=True, kw_only=True):
    task: str
    id: str
    sample: int = 0
    subject: str = ""
    prompt: str = ""
    """Digest of what was asked."""
    answer: str = ""
    reasoning: str = ""
    finish: str = ""
    strict: str | None = None
    """What was found strictly."""
    flexible: str | None = None
    strict_passed: bool | None = None
    flexible_passed: bool | None = None
    choices: dict[str, float] = {}
    """Log-probabilities, of tasks that compare them."""
    confidence: dict[str, float] = {}
    """Of the model in its own answer (`windlass eval --confidence`): what `windlass route fit` learns a cascade from."""
    verdict: VerdictName = "pending"
    why: str = ""
    tokens: Tokens = Tokens()
    seconds: float = 0.0
    """From the request that was answered to its end."""
    attempts: int = 1
    wall_seconds: float = 0.0
    """Time that passed since the answer before it, whichever task that was of: summed up, it is the time of the run."""
    joules: float | None = None

    @property
    def key(self) -> str:
        return key_of(self.task, self.id, self.sample)

    @property
    def is_truncated(self) -> bool:
        """At the limit of tokens; a choice by log-probability asks for one token only."""
        return self.finish == "length" and not self.choices


def key_of(task: str, id: str, sample: int) -> str:
    return f"{task}\t{id}\t{sample}"


def decode(payload: object) -> Record:
    return msgspec.convert(payload, Record)


class Journal(Protocol):
    """Where records are kept, as windlass.model.formats.disk.journal does; `cli` wires it in."""

    def records(self) -> dict[str, Any]: ...

    def record(self, key: str, payload: Any = None, sync: bool = True) -> None: ...

    def sync(self) -> None: ...
