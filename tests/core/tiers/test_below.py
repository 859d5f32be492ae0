"""Experts on disk below host memory: nothing over a cap, nothing twice, nothing lost, and refused only what truly does not fit."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.layout import Layout
from windlass.core.place import place
from windlass.core.scheme import scheme
from windlass.core.tiers.below import LEAST_CACHE_SLOTS, RoomBelow, planned_with_disk, with_disk
from windlass.core.tiers.demand import demand_of, planned_tensors
from windlass.core.tiers.device import RING_SLOTS, DeviceNeeds, DevicePlan, ModelStage, device_limits, plan_device
from windlass.core.tiers.values import Speeds, in_blocks
from windlass.errors import DoesNotFit
from windlass.model.families import rules
from windlass.model.families.registry import find, spec_of
from windlass.units import GB, MIB

pytestmark = pytest.mark.pure

SPEEDS = Speeds(host=60e9, link=50e9, disk=2.5e9, device=4e12)


def _plan(gigabytes: int, batch: float = 1.0, model: str = "GLM-4.5-Air") -> DevicePlan:
    known = find(model)
    assert known is not None
    spec = spec_of(known)
    table, how, layers = rules(spec), scheme("int4"), (0, spec.num_layers)
    tensors = planned_tensors(table, spec, place(table, spec.num_layers, Layout(), how), Layout(), how, 0, layers)
    stage, cap = ModelStage(spec, layers), gigabytes * GB
    return plan_device(stage, demand_of(tensors, spec, batch), cap, device_limits(stage, cap, DeviceNeeds()))


PLANS = {gigabytes: _plan(gigabytes) for gigabytes in (13, 24, 50)}


@given(st.sampled_from(sorted(PLANS)), st.integers(100, 60_000), st.integers(1, 80_000), st.sampled_from([0, 0, 5, 60, 128]))
def test_every_expert_has_one_home_within_the_caps(gigabytes: int, host: int, disk: int, written: int) -> None:
    plan, room = PLANS[gigabytes], RoomBelow(host * MIB, disk * MIB, written)
    try:
        found = with_disk(plan, room)
    except DoesNotFit as error:
        assert error.short_bytes > 0
        least = (LEAST_CACHE_SLOTS + RING_SLOTS) * in_blocks(plan.expert_bytes)
        assert room.host < least or room.disk < plan.split.num_layers * plan.split.off_device * in_blocks(plan.expert_bytes)
        return
    split = found.split
    assert split.on_device + split.in_host + split.on_disk == split.num_experts and min(split.in_host, split.on_disk) >= 0
    assert split.on_device == plan.split.on_device and split.num_slots == plan.split.num_slots, "the device has what it had"
    assert found.host_bytes <= room.host and found.disk_bytes <= room.disk
    assert split.cache_slots <= split.num_layers * split.on_disk
    assert not split.on_disk or split.cache_slots >= LEAST_CACHE_SLOTS
    placed = found.placed(SPEEDS)
    assert placed.device_slots + placed.host_slots - placed.cache_slots + placed.disk_experts == placed.num_experts
    assert planned_with_disk(plan, placed, room) == found or not split.on_disk, "a saved plan is followed"


def test_host_memory_that_is_large_enough_needs_no_disk() -> None:
    plan = PLANS[24]
    assert with_disk(plan, RoomBelow(plan.host_bytes, 10**12)) == plan
    assert with_disk(plan, RoomBelow(plan.host_bytes - 1, 10**12)).split.on_disk > 0


def test_a_file_of_an_earlier_run_is_used_where_it_can_be() -> None:
    """Free memory is never twice the same: a cache of another size leaves as many experts on disk as are there."""
    plan, host = PLANS[24], 30 * GB
    fresh = with_disk(plan, RoomBelow(host, 10**12))
    for written in (fresh.split.on_disk - 20, fresh.split.on_disk, fresh.split.on_disk + 10):
        again = with_disk(plan, RoomBelow(host, 10**12, written))
        assert again.split.on_disk == written and again.host_bytes <= host
    few = with_disk(plan, RoomBelow(host, 10**12, written=1))
    assert few.split.on_disk > 1 and few.split.cache_slots - LEAST_CACHE_SLOTS < few.split.num_layers, (
        "more than the file has are needed"
    )


def test_slower_with_less_memory_and_a_slower_disk() -> None:
    plan = PLANS[24]
    rooms = [with_disk(plan, RoomBelow(host * GB, 10**12)) for host in (38, 30, 20, 10, 2)]
    seconds = [one.placed(SPEEDS).step_seconds for one in rooms]
    assert seconds == sorted(seconds) and seconds[0] > plan.placed(SPEEDS).step_seconds
    slow = msgspec.structs.replace(SPEEDS, disk=0.5e9)
    assert rooms[2].placed(slow).step_seconds > 4 * rooms[2].placed(SPEEDS).step_seconds
    misses = rooms[2].step_disk_bytes / SPEEDS.disk
    assert misses <= rooms[2].placed(SPEEDS).step_seconds <= 1.2 * misses + 0.02, "reads take nearly all of it"


@pytest.mark.parametrize(
    ("host", "disk", "what"),
    [(30 * GB, 0, "raise --host-memory or --gpu-memory"), (30 * GB, GB, "free disk space"), (GB // 10, 10**12, "buffers")],
)
def test_what_is_missing_is_said(host: int, disk: int, what: str) -> None:
    with pytest.raises(DoesNotFit, match=what) as caught:
        with_disk(PLANS[24], RoomBelow(host, disk))
    assert caught.value.short_bytes > 0


def test_a_plan_for_more_memory_is_refused() -> None:
    plan = PLANS[24]
    placed = with_disk(plan, RoomBelow(30 * GB, 10**12)).placed(SPEEDS)
    with pytest.raises(DoesNotFit, match="the plan puts"):
        planned_with_disk(plan, placed, RoomBelow(20 * GB, 10**12))
