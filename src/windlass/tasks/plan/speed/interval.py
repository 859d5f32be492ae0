"""The interval around a prediction: how far published and measured speeds lay from what was predicted for them, by kind of run.

The fractions (spread.toml) are written by bench/plan/spread.py from the residuals of published and measured rows.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from windlass.core.hardware.cpu import num_cores
from windlass.core.model import Frozen
from windlass.tasks.plan.engines.load import knows, rates_on

if TYPE_CHECKING:
    from windlass.tasks.plan.speed.roofline import SpeedModel


class Kind(Enum):
    """Kinds of run that are predicted alike well."""

    OWN = "own kernels"
    OWN_PROMPT = "prompt own kernels"
    ONE = "decode one"
    BATCH = "decode batch"
    SERVING = "serving"
    BURST = "burst"
    PROMPT = "prompt GPU"
    HOST = "decode GPU+RAM"
    HOST_PROMPT = "prompt GPU+RAM"
    CPU = "decode CPU"
    CPU_PROMPT = "prompt CPU"
    APPLE = "decode Apple"
    APPLE_PROMPT = "prompt Apple"


class Entry(Frozen):
    low: float
    """Published over predicted: eight of ten rows lie between the two."""
    high: float
    rows: int
    """On which it rests."""
    note: str = ""


@dataclass(frozen=True)
class Spread:
    low: float
    high: float
    basis: str
    """In words: on what the interval rests."""

    def around(self, value: float, ceiling: float | None = None) -> tuple[float, float]:
        high = value * self.high
        return round(value * self.low, 3), round(high if ceiling is None else max(min(high, ceiling), value), 3)


UNKNOWN = 1.3
"""Both ends are moved out by this where the engine's file has no figures of such a device."""


@cache
def _entries() -> dict[str, Entry]:
    text = Path(__file__).with_name("spread.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, Entry])


def kind_of(times: SpeedModel, what: str) -> Kind:
    """`what`: decode or prompt."""
    prompt = what == "prompt"
    kinds = {slot.device.kind for slot in times.fit.slots}
    if "cpu" in kinds:
        return Kind.CPU_PROMPT if prompt else Kind.CPU
    if times.fit.host_bytes or times.fit.disk_bytes:
        return Kind.HOST_PROMPT if prompt else Kind.HOST
    if "metal" in kinds:
        return Kind.APPLE_PROMPT if prompt else Kind.APPLE
    if all(times.kernel_pass.has(slot) for slot in times.fit.slots):
        return Kind.OWN_PROMPT if prompt else Kind.OWN
    if prompt:
        return Kind.PROMPT
    return Kind.ONE if times.model.workload.concurrency == 1 else Kind.BATCH


def spread_of(times: SpeedModel, kind: Kind) -> Spread:
    found = _entries()[kind.value]
    basis = f"{kind.value}: {found.rows} published or measured rows" + (f", {found.note}" if found.note else "")
    own = all(times.kernel_pass.has(slot) for slot in times.fit.slots)
    if not own and not all(knows(times.engine, slot.device) for slot in times.fit.slots):
        basis += f"; {times.engine.title} on such a device is not among them, so it is wider"
        return Spread(found.low / UNKNOWN, found.high * UNKNOWN, basis)
    if any(0 < rates_on(times.engine, slot.device).tried_cores < num_cores(slot.device) for slot in times.fit.slots):
        basis += f"; {times.engine.title} was not measured with so many cores, so it is wider"
        return Spread(found.low / UNKNOWN, found.high * UNKNOWN, basis)
    return Spread(found.low, found.high, basis)
