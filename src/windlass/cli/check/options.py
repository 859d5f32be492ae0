"""What is asked of `windlass check`, and what its parts give back."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.core.model import Frozen
from windlass.errors import Error
from windlass.tasks.check.needs import Needs
from windlass.tasks.check.report import Check, failed, passed

if TYPE_CHECKING:
    from windlass.core.plan import Plan


class CheckOptions(Frozen):
    target: str = ""
    hosts: Path | None = None
    full: bool = False
    folder: Path = Path()
    shared: Path | None = None
    ports: tuple[int, ...] = ()
    tasks: str | None = None
    examples: int | None = None
    price: float = 0.0
    quant: str | None = None
    random_weights: bool = False
    device: str = "auto"
    context_tokens: int | None = None
    monitor: str | None = None
    python: str = ""
    as_json: bool = False


class Found(Frozen):
    """What the target needs, and the rows and estimates of its own checks."""

    needs: Needs = Needs()
    rows: tuple[Check, ...] = ()
    estimates: dict[str, Any] = {}


def say(options: CheckOptions, text: str) -> None:
    """What takes longer than two seconds is announced, on a terminal."""
    if not options.as_json and sys.stderr.isatty():
        print(f"... {text}", file=sys.stderr, flush=True)


def plan_row(plan: Plan) -> Check:
    from windlass.units import format_bytes

    fullest = max(plan.memory.per_device, key=lambda device: device.total_bytes)
    shown = (
        f"{format_bytes(fullest.total_bytes)} of {format_bytes(fullest.capacity_bytes)} on the fullest device of {plan.hardware}"
    )
    if plan.fits:
        return passed("plan", shown)
    remedy = "; ".join(plan.would_fit[:2]) or "more or larger devices"
    return failed("plan", f"{shown}: {format_bytes(plan.short_bytes)} short", "that it fits", remedy)


def problem_of(error: Error) -> str:
    return " ".join(str(error).split())
