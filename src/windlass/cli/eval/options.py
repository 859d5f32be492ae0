"""The options of `windlass eval` that change no answer, and how words and launches become settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from windlass.core.launch import Launch, check_launch
from windlass.core.ranks.rendezvous import EXACT
from windlass.errors import BadInput, UnknownName
from windlass.tasks.evaluate.run.settings import Wanted, check

STYLES = ("chat", "completion")
LAYOUTS = ("lm-eval", "inspect")


class EvalOptions(msgspec.Struct, frozen=True, kw_only=True):
    concurrency: int | None = None
    results_dir: Path | None = None
    resume: bool = False
    budget: str | None = None
    price: str | None = None
    watts: float | None = None
    prometheus: int | None = None
    region: str = "world"
    api_key: str | None = None
    skip_execution: bool = False
    execute_anyway: bool = False
    harness: tuple[str, str] = ("", "")
    export: str | None = None
    confidence: bool = False
    wait_seconds: float = 600.0
    deadline_seconds: float = 600.0
    launch: Launch = Launch()
    as_json: bool = False

    @property
    def layouts(self) -> tuple[str, ...]:
        return tuple(part.strip() for part in (self.export or "").split(",") if part.strip())


def wanted_from(given: Mapping[str, Any]) -> Wanted:
    style = given["style"]
    if style is not None and style not in STYLES:
        raise UnknownName("prompt style", style, STYLES)
    wanted = Wanted(**given)
    check(wanted)
    return wanted


def with_launch(wanted: Wanted, launch: Launch) -> Wanted:
    """And those options of a launch that change answers. What is at its default counts as not given."""
    return msgspec.structs.replace(
        wanted,
        quant=launch.quant,
        kv=launch.kv,
        exact=launch.exact or None,
        deterministic=launch.deterministic or None,
        context=launch.context_tokens,
        sync=None if launch.sync == EXACT else launch.sync,
    )


def launch_of(wanted: Wanted, launch: Launch) -> Launch:
    """A resumed run's answers are all computed in one way."""
    made = msgspec.structs.replace(
        launch,
        quant=wanted.quant,
        kv=wanted.kv,
        exact=bool(wanted.exact),
        deterministic=bool(wanted.deterministic),
        context_tokens=wanted.context,
        sync=wanted.sync or EXACT,
    )
    check_launch(made)
    return made


def check_options(options: EvalOptions) -> None:
    """Everything that can be refused before a model is opened."""
    from windlass.core.hardware.energy import grid

    grid(options.region)
    if options.concurrency is not None and options.concurrency < 1:
        raise BadInput(f"--concurrency is {options.concurrency}; it should be at least 1")
    if options.skip_execution and options.execute_anyway:
        raise BadInput("--skip-execution and --execute-anyway contradict each other")
    for layout in options.layouts:
        if layout not in LAYOUTS:
            raise UnknownName("export layout", layout, LAYOUTS)
    if options.harness[0] not in ("", "lm-eval"):
        raise UnknownName("harness", options.harness[0], ["lm-eval"])
