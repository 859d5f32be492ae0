"""80 % intervals of predictions, from the residuals of their class (intervals.toml). Pure."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

import msgspec

from windlass.core.hardware.spec import Device
from windlass.core.model import Frozen, ModelSpec
from windlass.tasks.plan.training.frameworks import device_class
from windlass.tasks.plan.training.job import TrainingJob


class Interval(Frozen):
    low: float
    high: float

    def times(self, value: float) -> Interval:
        return Interval(low=self.low * value, high=self.high * value)

    def holds(self, ratio: float) -> bool:
        return self.low <= ratio <= self.high

    @property
    def inverse(self) -> Interval:
        """Of a time, if this is of a speed."""
        return Interval(low=1 / self.high, high=1 / self.low)


class Unseen(Frozen):
    factor: float
    devices: tuple[str, ...]


class Residuals(Frozen):
    speed: dict[str, tuple[float, float]]
    memory: dict[str, tuple[float, float]]
    unseen: Unseen


class Intervals(Frozen):
    """Of a prediction, as factors on it."""

    speed: Interval
    memory: Interval
    known: bool
    """Whether rows of this class of device were compared."""


@cache
def residuals() -> Residuals:
    text = Path(__file__).with_name("intervals.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), Residuals)


def trained_kind(spec: ModelSpec, job: TrainingJob) -> str:
    if job.lora.rank is not None:
        return "adapters"
    return "moe" if spec.experts else "dense"


def intervals_of(spec: ModelSpec, job: TrainingJob, device: Device) -> Intervals:
    found, kind = residuals(), f"{job.framework}-{trained_kind(spec, job)}"
    known = device_class(device) not in found.unseen.devices
    wider = 1.0 if known else found.unseen.factor
    return Intervals(speed=_widened(found.speed[kind], wider), memory=_widened(found.memory[kind], 1.0), known=known)


def _widened(limits: tuple[float, float], factor: float) -> Interval:
    return Interval(low=limits[0] / factor, high=limits[1] * factor)
