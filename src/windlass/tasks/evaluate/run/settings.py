"""What a run depends on. Two runs with the same settings ask the same questions in the same way; a journal belongs to one of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.core.model import Frozen
from windlass.errors import BadInput
from windlass.tasks.evaluate.tasks.questions import Style

SAMPLED_TEMPERATURE = 0.8
"""Where several samples are asked for and no temperature: HumanEval's authors' for large k (arXiv 2107.03374, section 3.2)."""


class TaskSettings(Frozen):
    name: str
    toml: str
    """Digest of the task's TOML."""
    data: str
    """Digest of its rows."""
    shots: int
    num_questions: int
    style: Style
    max_tokens: int


class Settings(Frozen):
    """Of one model. JSON values only."""

    model: str
    weights: str = ""
    """Digest of a local model's weights; empty for a server."""
    tasks: tuple[TaskSettings, ...] = ()
    num_examples: int | None = None
    samples: int = 1
    temperature: float = 0.0
    seed: int = 0
    thinking: bool | None = None
    quant: str | None = None
    kv: str | None = None
    exact: bool | None = None
    deterministic: bool | None = None
    context: int | None = None
    sync: str | None = None
    """How a local model computes, from `quant` on; None: the default, or a server's own."""

    def fingerprint(self) -> dict[str, Any]:
        """Differences are named by these keys: one for each task, so that a message says which."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        tasks = {f"task {task['name']}": task for task in found.pop("tasks")}
        return {**found, **tasks, "tasks": ",".join(task.name for task in self.tasks)}


class Wanted(Frozen):
    """As given on the command line; None: the default, or what a resumed run had."""

    models: tuple[str, ...] = ()
    tasks: str | None = None
    category: str | None = None
    num_examples: int | None = None
    shots: int | None = None
    samples: int | None = None
    temperature: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    style: Style | None = None
    thinking: bool | None = None
    quant: str | None = None
    kv: str | None = None
    exact: bool | None = None
    deterministic: bool | None = None
    context: int | None = None
    """In tokens."""
    sync: str | None = None


def check(wanted: Wanted) -> None:
    for name, least in (("num_examples", 1), ("shots", 0), ("samples", 1), ("max_tokens", 1)):
        value = getattr(wanted, name)
        if value is not None and value < least:
            raise BadInput(f"--{name.replace('_', '-')} is {value}; it should be at least {least}")
    if (wanted.samples or 1) > 1 and wanted.temperature == 0:
        raise BadInput("several samples at temperature 0 are all the same; leave --temperature out, or --samples")


SAVED = "settings.json"


def encode_wanted(wanted: Wanted) -> bytes:
    """Of the file SAVED in a results folder."""
    return msgspec.json.format(msgspec.json.encode(wanted), indent=1)


def resumed(folder: Path, wanted: Wanted) -> Wanted:
    """The settings of the run in this folder. What is given anew must be the same."""
    try:
        saved = msgspec.json.decode((folder / SAVED).read_bytes(), type=Wanted)
    except FileNotFoundError:
        return wanted
    except (OSError, *DECODE_ERRORS) as error:
        raise BadInput(f"{folder / SAVED} cannot be read: {error}") from None
    for field in msgspec.structs.fields(Wanted):
        given, had = getattr(wanted, field.name), getattr(saved, field.name)
        if given not in (None, (), had):
            option = f"--{field.name.replace('_', '-')}" if field.name != "models" else "the models"
            raise BadInput(
                f"{folder} holds a run with {option} {_shown(had)}, not {_shown(given)}; leave it out, or use another --results-dir"
            )
    return saved


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(str(item) for item in value)  # type: ignore[reportUnknownVariableType]
    return "left to its default" if value is None else str(value)


def folder_name(model: str) -> str:
    """A model's label as a folder's name."""
    return re.sub(r"[^\w.-]+", "-", model).strip("-.") or "model"
