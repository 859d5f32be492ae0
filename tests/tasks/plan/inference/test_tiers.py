"""Plans that offload: the placement of each rank is in the plan, fits its caps, and is what the engine is given."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from windlass.core.hardware.caps import capped
from windlass.core.hardware.parse import parse_hardware
from windlass.core.layout import Layout
from windlass.core.model import kv_bytes_per_token
from windlass.core.place import place
from windlass.core.plan import Plan, encode_plan, load_plan
from windlass.core.scheme import scheme
from windlass.core.tiers.below import RoomBelow, planned_with_disk
from windlass.core.tiers.budget import GPU_PROCESS_BYTES, LOADING_BYTES
from windlass.core.tiers.demand import demand_of, planned_tensors
from windlass.core.tiers.device import DeviceLimits, DeviceNeeds, ModelStage, device_limits, plan_device
from windlass.core.tiers.values import Demand
from windlass.model.families import rules
from windlass.model.families.registry import KnownModel, find, spec_of
from windlass.tasks.plan.inference.assemble import make_plan
from windlass.tasks.plan.inference.search.request import PlanRequest
from windlass.units import GB, GIB, MIB

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
    assert plan.speed is not None and plan.speed.bound_by == "expert fetch" and not plan.caution, "it was run"


@pytest.mark.parametrize(("hardware", "pins", "caps"), [
    ("2xH200,ram=256GB", {"pp": 2}, (70 * GB,)),
    ("3xH100-80GB,ram=256GB", {"pp": 3}, (70 * GB, 60 * GB)),
    ("H200,ram=256GB", {}, ()),
])  # fmt: skip
def test_gpu_and_host_of_every_rank(hardware: str, pins: dict[str, int], caps: tuple[int, ...]) -> None:
    """The guide's case: Llama-3.1-405B over two or three GPUs of 70 GB with 200 GB of host memory. As the engine places it on each rank."""
    plan = planned("Llama-3.1-405B", hardware, host=200 * GB, gpus=caps, **pins)
    assert plan.fits and len(plan.tiers) == plan.layout.world == max(len(plan.tiers), 1) and plan.layout.tp == 1
    assert all(one.device_bytes and one.host_slots and not one.host_units and not one.disk_bytes for one in plan.tiers)
    assert all(held.total_bytes <= held.capacity_bytes for held in plan.memory.per_device)
    assert sum(one.host_bytes for one in plan.tiers) == plan.memory.host_bytes <= 200 * GB * 0.9
    assert plan.placement is not None
    for tiers, held, layers in zip(plan.tiers, plan.memory.per_device, plan.placement.stages, strict=True):
        stage = ModelStage(spec_of(_known("Llama-3.1-405B")), layers)
        demand = _demand(stage)
        limits = DeviceLimits(*map(min, zip(*(_limits(plan, layers) for layers in plan.placement.stages), strict=True)))
        found = plan_device(stage, demand, int(held.capacity_bytes * 0.97), limits, most=tiers.device_slots)
        assert found.split.num_layers * found.split.on_device == tiers.device_slots, "the engine would place otherwise"
        assert found.host_bytes == tiers.host_bytes


def _known(name: str) -> KnownModel:
    known = find(name)
    assert known is not None
    return known


def _limits(plan: Plan, layers: tuple[int, int]) -> DeviceLimits:
    """As the engine takes them from a Launch of this plan."""
    kv = kv_bytes_per_token(plan.spec, 2) * plan.workload.context_tokens * plan.workload.concurrency if plan.spec else 0
    caps = [int(held.capacity_bytes * 0.97) for held in plan.memory.per_device]
    needs = DeviceNeeds("bf16", kv, plan.workload.context_tokens)
    assert plan.spec is not None
    return device_limits(ModelStage(plan.spec, layers), min(caps), needs)


def _demand(stage: ModelStage) -> Demand:
    table, how = rules(stage.spec), scheme("int4")
    placement = place(table, stage.spec.num_layers, Layout(), how)
    return demand_of(planned_tensors(table, stage.spec, placement, Layout(), how, 0, stage.layers), stage.spec)


@pytest.mark.parametrize(
    ("hardware", "pins"), [("2xA100-80GB,ram=256GB,disk=500GB", {}), ("2xH200,ram=256GB,disk=900GB", {"tp": 2})]
)
def test_what_cannot_run_is_not_planned(hardware: str, pins: dict[str, int]) -> None:
    """GPUs without our kernels, layers that are split over them, and disk below host memory."""
    plan = planned("Llama-3.1-405B", hardware, host=60 * GB, gpus=(60 * GB,), **pins)
    assert not plan.fits and plan.short_bytes > 0 and not plan.tiers


def test_no_disk_below_a_gpu_for_dense_models() -> None:
    plan = planned("Llama-3.1-405B", "H200,ram=256GB,disk=900GB", host=20 * GB)
    assert not plan.fits and plan.short_bytes > 0 and not plan.tiers
    assert any(reason.choice == "disk" and "only routed experts" in reason.why for reason in plan.reasons)


def test_experts_on_disk_below_a_gpu() -> None:
    """As the engine places it, with the time that reading takes; refused, with the number, where the disk is too small."""
    plan = planned("GLM-4.5-Air", "H200,ram=256GB,disk=100GB", host=30 * GB, gpus=(24 * GB,))
    (tiers,) = plan.tiers
    assert plan.fits and tiers.device_slots and tiers.disk_experts and tiers.cache_slots and not tiers.disk_units
    assert plan.memory.disk_bytes == tiers.disk_bytes <= 100 * GB and tiers.host_bytes <= 27 * GB
    assert plan.speed is not None and plan.speed.bound_by == "expert fetch"
    stage = ModelStage(spec_of(_known("GLM-4.5-Air")), (0, 46))
    cap = int(plan.memory.per_device[0].capacity_bytes * 0.97)
    whole = plan_device(stage, _demand(stage), cap, _limits(plan, stage.layers), most=tiers.device_slots)
    made = planned_with_disk(whole, tiers, RoomBelow(27 * GB, 100 * GB))
    assert (made.host_bytes, made.disk_bytes) == (tiers.host_bytes, tiers.disk_bytes), "the engine would place otherwise"
    (reason,) = [one for one in plan.reasons if one.choice == "experts"]
    assert "at a time in a cache" in reason.value and f"{tiers.disk_experts:,} are on disk" in reason.why
    faster = planned("GLM-4.5-Air", "H200,ram=256GB,disk=100GB,disk_bw=10GB", host=30 * GB, gpus=(24 * GB,))
    assert faster.speed is not None and faster.speed.decode_tokens_per_second > 2 * plan.speed.decode_tokens_per_second
    small = planned("GLM-4.5-Air", "H200,ram=256GB,disk=10GB", host=30 * GB, gpus=(24 * GB,))
    assert not small.fits and small.short_bytes > 0 and not small.tiers


def test_a_plan_for_little_host_memory_leaves_room_for_the_process() -> None:
    """As the engine counts it, which would refuse such a plan otherwise."""
    (tiers,) = planned("GLM-4.5-Air", "H200,ram=256GB,disk=100GB", host=12 * GB, gpus=(24 * GB,)).tiers
    room = 12 * GB - GPU_PROCESS_BYTES - LOADING_BYTES
    assert room - 20 * MIB < tiers.host_bytes <= room


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
    on_gpus = planned("Llama-3.1-405B", "2xH200,ram=256GB", host=200 * GB, gpus=(70 * GB,), pp=2)
    launch = open_plan.apply_plan(Launch(model=str(tmp_path)), on_gpus)
    assert launch.tiers == on_gpus.tiers and len(launch.tiers) == 2 and launch.layout.pp == 2
    assert launch.planned is not None and on_gpus.placement is not None and launch.planned.stages == on_gpus.placement.stages
    split = msgspec.structs.replace(on_gpus, layout=Layout(tp=2))
    with pytest.raises(Exception, match="whole layers are needed"):
        open_plan.apply_plan(Launch(model=str(tmp_path)), split)
