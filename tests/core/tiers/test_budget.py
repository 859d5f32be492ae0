"""Host memory of a rank on a GPU: what its process takes is counted once, and what is left goes to experts."""

from __future__ import annotations

import msgspec
import pytest

from windlass.core.layout import Layout
from windlass.core.place import place
from windlass.core.scheme import scheme
from windlass.core.tiers.below import RoomBelow, with_disk
from windlass.core.tiers.budget import GPU_GROWTH_BYTES, GPU_PROCESS_BYTES, LOADING_BYTES, gpu_reserve_bytes
from windlass.core.tiers.demand import demand_of, planned_tensors
from windlass.core.tiers.device import DeviceNeeds, DevicePlan, ModelStage, device_limits, plan_device
from windlass.model.families import rules
from windlass.model.families.registry import find, spec_of
from windlass.units import GB, GIB, MIB

pytestmark = pytest.mark.pure

MEASURED_PROCESS = int((7.26 - 5.41) * GIB)
"""Beside blocks of experts, after warm-up and prompts (docs/reference/offload.md)."""


def _measured_plan() -> DevicePlan:
    """GLM-4.5-Air with 14 layers, `--gpu-memory 14GB`, as it ran beside an H200."""
    known = find("GLM-4.5-Air")
    assert known is not None
    spec = spec_of(known)
    spec = msgspec.structs.replace(spec, layers=spec.layers[:14])
    table, how, layers = rules(spec), scheme("int4"), (0, spec.num_layers)
    tensors = planned_tensors(table, spec, place(table, spec.num_layers, Layout(), how), Layout(), how, 0, layers)
    stage, cap = ModelStage(spec, layers), 14 * GB
    return plan_device(stage, demand_of(tensors, spec), cap, device_limits(stage, cap, DeviceNeeds()))


@pytest.mark.parametrize("used", [300 * MIB, GIB, 1400 * MIB])
def test_a_process_takes_the_same_however_much_of_it_is_loaded(used: int) -> None:
    assert used + gpu_reserve_bytes(used) == GPU_PROCESS_BYTES


def test_a_large_process_still_grows() -> None:
    assert gpu_reserve_bytes(5 * GIB) == GPU_GROWTH_BYTES >= int(0.54 * GIB)


@pytest.mark.parametrize("used", [700 * MIB, GIB, 1300 * MIB])
def test_a_cap_is_used_but_for_a_small_margin(used: int) -> None:
    """Under 12 GB (11.18 GiB): 5.34 GiB of slots were all that an earlier budget left, and 3.9 GiB held nothing."""
    plan, cap = _measured_plan(), 12 * GB
    made = with_disk(plan, RoomBelow(cap - used - gpu_reserve_bytes(used) - LOADING_BYTES, 10**12))
    split = made.split
    assert split.on_device == 40 and split.on_disk > 0
    assert split.num_layers * split.in_host + split.cache_slots > 1050, "of 1,144 that are not on the device"
    left = cap - made.host_bytes - MEASURED_PROCESS
    assert 0 < left < 300 * MIB
