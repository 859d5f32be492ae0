"""Efficiencies of training frameworks, from frameworks.toml: fitted numbers, where everything else is counted."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

import msgspec

from windlass.core.hardware.spec import Device
from windlass.core.model import Frozen
from windlass.core.recipe.recipe import Recipe
from windlass.core.recipe.sections import Framework, LossKind
from windlass.tasks.plan.training.job import TrainingJob

DeviceClass = str
"""`ampere`: cards without 8-bit floats; `hopper` and `blackwell`; `consumer`: GeForce and workstation cards; `other`."""


class Efficiency(Frozen):
    """Of one framework, eager or compiled. Every field is explained in frameworks.toml."""

    products: dict[str, dict[str, float]]
    """By device class, then by compute type."""
    passes: float
    flash: dict[str, tuple[float, float]]
    exposed: float
    ring: float
    host_seconds: float
    reserved: float

    def of_products(self, device: Device, compute: str) -> float:
        found = self.products.get(device_class(device)) or self.products["other"]
        return found.get(compute, found["bf16"])

    def of_flash(self, device: Device) -> tuple[float, float]:
        return self.flash.get(device_class(device)) or self.flash["other"]


def device_class(device: Device) -> DeviceClass:
    if device.kind != "cuda":
        return "other"
    if device.name.startswith("RTX"):
        return "consumer"
    if "fp4" in device.flops:
        return "blackwell"
    return "hopper" if "fp8" in device.flops and device.bandwidth > 1.5e12 else "ampere"


@cache
def table() -> dict[str, Efficiency]:
    text = Path(__file__).with_name("frameworks.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), dict[str, Efficiency])


@cache
def efficiency(framework: str, compiled: bool) -> Efficiency:
    """Compiled where that makes a difference; Megatron and DeepSpeed have kernels of their own."""
    found = table()
    return found.get(f"{framework}-compiled" if compiled else framework) or found[framework]


def efficiency_of(job: TrainingJob) -> Efficiency:
    return efficiency(job.framework, job.compile)


def framework_of(recipe: Recipe) -> Framework:
    """One for the whole search, so that layouts compare. Who pins tp or pp has Megatron or its like."""
    asked = recipe.assume.framework
    if asked != "auto":
        return asked
    if recipe.run.engine == "deepspeed":
        return "deepspeed"
    return "megatron" if (recipe.parallel.tp or 1) * (recipe.parallel.pp or 1) > 1 else "pytorch"


def loss_of(recipe: Recipe) -> LossKind:
    asked = recipe.assume.loss
    if asked != "auto":
        return asked
    return "fused" if framework_of(recipe) == "megatron" else "whole"
