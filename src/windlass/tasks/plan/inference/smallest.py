"""The smallest hardware of a list of common configurations that runs a model."""

from __future__ import annotations

from windlass.core.hardware.parse import parse_hardware
from windlass.core.model import ModelSpec
from windlass.core.rule import Rule
from windlass.tasks.plan.inference.remedy import fits_devices
from windlass.tasks.plan.inference.search.request import PlanRequest

LADDER = (
    "cpu:8,ram=16GB", "1xRTX-4090", "1xRTX-5090", "1xL40S", "1xA100-80GB", "1xRTX-PRO-6000", "1xH200", "2xH100-80GB", "1xB200",
    "2xH200", "4xH100-80GB", "4xH200", "8xH100-80GB", "8xH200", "8xB200", "8xB300", "2x(8xH200)", "4x(8xH200)",
)  # fmt: skip
"""In order of memory; each is sold or rented as a unit."""


def smallest_hardware(spec: ModelSpec, rules: tuple[Rule, ...]) -> str:
    """In the least lossy scheme that fits (down to int4), with 8k tokens of context and without offloading."""
    context = min(8192, spec.context_tokens)
    for name in LADDER:
        found = fits_devices(PlanRequest(spec=spec, rules=rules, hardware=parse_hardware(name), context_tokens=context))
        if found is not None:
            return f"{name} ({found.scheme.name})"
    return "none listed"
