"""What goes to a device and what to host memory beside it: never over a cap, and stages of a pipeline hold together what one device would."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.layout import Layout
from windlass.core.place import Interval, place
from windlass.core.scheme import scheme
from windlass.core.tiers.demand import demand_of, planned_tensors
from windlass.core.tiers.device import DeviceLimits, DeviceNeeds, DevicePlan, ModelStage, device_limits, needed_bytes, plan_device
from windlass.core.tiers.values import Demand, Speeds
from windlass.errors import DoesNotFit
from windlass.model.families import rules
from windlass.model.families.registry import find, spec_of
from windlass.units import GB, GIB

pytestmark = pytest.mark.pure

SPEEDS = Speeds(host=60e9, link=50e9, disk=0.0, device=4e12)
MODELS = {"Llama-3.1-405B": 52, "GLM-4.5-Air": 128}
"""Slices of a layer, or experts."""


def stage_of(name: str, layers: Interval | None = None) -> tuple[ModelStage, Demand]:
    known = find(name)
    assert known is not None
    spec = spec_of(known)
    held = layers or (0, spec.num_layers)
    table, how = rules(spec), scheme("int4")
    tensors = planned_tensors(table, spec, place(table, spec.num_layers, Layout(), how), Layout(), how, 0, held)
    return ModelStage(spec, held), demand_of(tensors, spec)


WHOLE = {name: stage_of(name) for name in MODELS}


def on_device(plan: DevicePlan) -> int:
    return plan.placed(SPEEDS).device_bytes + plan.kv_bytes + plan.beside_bytes


@given(st.sampled_from(sorted(MODELS)), st.integers(10, 160), st.integers(1, 60))
def test_a_plan_stays_below_its_cap(name: str, gigabytes: int, kv_gigabytes: int) -> None:
    (stage, demand), cap = WHOLE[name], gigabytes * GB
    limits = device_limits(stage, cap, DeviceNeeds(kv_bytes=kv_gigabytes * GB))
    try:
        plan = plan_device(stage, demand, cap, limits)
    except DoesNotFit as error:
        assert error.short_bytes > 0
        return
    split = plan.split
    assert plan.kv_bytes >= kv_gigabytes * GB and on_device(plan) <= cap
    assert split.on_device + split.in_host == split.num_experts == MODELS[name]
    slower = plan.placed(Speeds(host=30e9, link=50e9, disk=0.0, device=4e12)).step_seconds
    assert plan.placed(SPEEDS).step_seconds < slower or not split.in_host


@pytest.mark.parametrize("name", MODELS)
def test_stages_hold_together_what_the_model_has(name: str) -> None:
    """Two devices of half the memory: about as much in host memory, and the same cache."""
    stage, demand = WHOLE[name]
    half, needs = stage.spec.num_layers // 2, DeviceNeeds(context_tokens=4096, step_tokens=1024)
    parts = [stage_of(name, (0, half)), stage_of(name, (half, stage.spec.num_layers))]
    assert sum(part.total_bytes for _, part in parts) == demand.total_bytes
    cap = 60 * GB if name.startswith("Llama") else 20 * GB
    limits = DeviceLimits(*map(min, zip(*(device_limits(one, cap, needs) for one, _ in parts), strict=True)))
    plans = [plan_device(one, part, cap, limits) for one, part in parts]
    assert all(on_device(plan) <= cap for plan in plans)
    first = 1 if name == "GLM-4.5-Air" else 0
    assert [plan.first_layer for plan in plans] == [first, half]
    assert [plan.split.num_layers for plan in plans] == [half - first, stage.spec.num_layers - half]
    assert sum(plan.kv_bytes for plan in plans) == limits.kv_tokens * stage.kv_token_bytes("bf16")


def test_the_guides_case() -> None:
    """Llama-3.1-405B at int4 over three GPUs of 70 GB, and over two with 200 GB of host memory."""
    for count in (2, 3):
        bounds = [126 * number // count for number in range(count + 1)]
        plans = []
        for first, last in pairwise(bounds):
            stage, demand = stage_of("Llama-3.1-405B", (first, last))
            limits = device_limits(stage, 70 * GB, DeviceNeeds(context_tokens=4096))
            plans.append(plan_device(stage, demand, 70 * GB, limits))
        assert all(on_device(plan) <= 70 * GB for plan in plans)
        assert sum(plan.host_bytes for plan in plans) < (110 if count == 2 else 40) * GB


def test_a_plan_is_kept_to() -> None:
    """No more experts on the device than were planned, though there is room."""
    stage, demand = WHOLE["GLM-4.5-Air"]
    limits = device_limits(stage, 60 * GB, DeviceNeeds(context_tokens=4096))
    free, planned = plan_device(stage, demand, 60 * GB, limits), plan_device(stage, demand, 60 * GB, limits, most=45 * 10)
    assert free.split.on_device > planned.split.on_device == 10


def test_a_rank_whose_weights_fit_needs_no_staging() -> None:
    stage, demand = WHOLE["GLM-4.5-Air"]
    limits = device_limits(stage, 80 * GB, DeviceNeeds(context_tokens=4096))
    assert demand.total_bytes + 4 * GIB < needed_bytes(stage, demand.total_bytes, limits, "bf16") + 4 * GIB < 80 * GB
