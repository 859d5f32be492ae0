"""Plans that offload: the placement of each rank is in the plan, fits its caps, and is what the engine is given."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from windlass.core.hardware.caps import capped
from windlass.core.hardware.parse import parse_hardware
from windlass.core.plan import Plan, encode_plan, load_plan
from windlass.families import rules
from windlass.families.registry import find, spec_of
from windlass.plan.inference.assemble import make_plan
from windlass.plan.inference.search.request import PlanRequest
from windlass.units import GB, GIB

pytestmark = pytest.mark.pure


def planned(model: str, hardware: str, host: int | None = None, gpus: tuple[int, ...] = (), **pins: int) -> Plan:
    known = find(model)
    assert known is not None
    spec = spec_of(known)
    found = capped(parse_hardware(hardware), gpus, host)
    return make_plan(
        PlanRequest(spec=spec, rules=rules(spec), hardware=found, context_tokens=4096, quant="int4", engine="windlass", pins=pins)
    )


def test_a_plan_that_fits_has_no_tiers() -> None:
    assert planned("Qwen3-8B", "cpu:8,ram=32GB").tiers == ()


def test_a_dense_model_streams_from_disk() -> None:
    plan = planned("Qwen3-32B", "cpu:8,ram=64GB,disk=100GB", host=12 * GB)
    (tiers,) = plan.tiers
    assert plan.fits and tiers.disk_units and not tiers.num_experts
    (held,) = plan.memory.per_device
    assert held.capacity_bytes == 12 * GB and held.total_bytes <= held.capacity_bytes
    assert held.weights_bytes == tiers.host_bytes and plan.memory.disk_bytes == tiers.disk_bytes
    assert plan.speed is not None and plan.speed.bound_by == "disk"
    assert any(reason.choice == "streamed" for reason in plan.reasons)


def test_a_mixture_keeps_a_cache_of_experts() -> None:
    plan = planned("GLM-4.5-Air", "cpu:16,ram=128GB,disk=200GB", host=32 * GB)
    (tiers,) = plan.tiers
    assert tiers.num_experts == tiers.disk_experts == 45 * 128
    assert 0 < tiers.host_slots < tiers.num_experts
    assert tiers.host_bytes + GIB // 2 < 32 * GB
    assert plan.speed is not None and plan.speed.bound_by == "expert fetch"


def test_gpu_host_and_disk_of_every_rank() -> None:
    plan = planned("Llama-3.1-405B", "3xA100-80GB,ram=256GB,disk=500GB", host=60 * GB, gpus=(40 * GB, 30 * GB))
    assert plan.fits and len(plan.tiers) == plan.layout.world
    assert all(one.device_bytes and one.host_units for one in plan.tiers)
    assert all(held.total_bytes <= held.capacity_bytes <= 40 * GB for held in plan.memory.per_device)
    assert plan.memory.host_bytes <= 60 * GB * 0.9
    assert plan.memory.disk_bytes > 0


def test_a_plan_survives_its_file() -> None:
    plan = planned("GLM-4.5-Air", "cpu:16,ram=128GB,disk=200GB", host=32 * GB)
    assert load_plan(encode_plan(plan)) == plan


def test_too_little_for_buffers_does_not_fit() -> None:
    plan = planned("GLM-4.5-Air", "cpu:16,ram=128GB,disk=200GB", host=3 * GB)
    assert not plan.fits and plan.short_bytes > 0 and plan.tiers == ()


@pytest.mark.parametrize(
    ("gpus", "host", "expected"),
    [((), None, (80, 80)), ((70 * GB,), None, (70, 70)), ((70 * GB, 40 * GB), None, (70, 40)), ((999 * GB,), 1, (80, 80))],
)
def test_caps(gpus: tuple[int, ...], host: int | None, expected: tuple[int, int]) -> None:
    hardware = capped(parse_hardware("2xA100-80GB,ram=200GB"), gpus, host)
    sizes = tuple(round(min(device.memory_bytes, 80 * GB) / GB) for device in hardware.devices)
    assert sizes == expected
    assert hardware.nodes[0].ram_bytes == (1 if host else 200 * GB)


def test_a_cpu_is_capped_with_its_node() -> None:
    hardware = capped(parse_hardware("2x(cpu:8,ram=32GB)@1Gb"), (), 8 * GB)
    assert {device.memory_bytes for device in hardware.devices} == {8 * GB} == {node.ram_bytes for node in hardware.nodes}


def test_the_launch_gets_the_placement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from windlass.core.launch import Launch
    from windlass.open import plan as open_plan

    plan = planned("GLM-4.5-Air", "cpu:16,ram=128GB,disk=200GB", host=32 * GB)
    monkeypatch.setattr(open_plan, "_check_model", lambda *_: None)
    launch = open_plan.apply_plan(Launch(model=str(tmp_path)), plan)
    assert launch.tiers == plan.tiers and launch.host_memory == 32 * GB
    on_gpus = planned("Llama-3.1-405B", "2xA100-80GB,ram=256GB,disk=500GB")
    with pytest.raises(Exception, match="streams matrices to a GPU, which this engine does not do yet"):
        open_plan.apply_plan(Launch(model=str(tmp_path)), on_gpus)
    assert msgspec.structs.replace(launch, tiers=()).tiers == ()
