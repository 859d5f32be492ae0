"""What is offered, fits; what is not offered was no help."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from windlass.core.hardware.parse import parse_hardware
from windlass.core.model import ModelSpec
from windlass.core.recipe.recipe import recipe_from
from windlass.core.rule import Rule
from windlass.errors import Impossible
from windlass.tasks.plan.training.plan import TrainingPlan, plan_training
from windlass.tasks.plan.training.remedy import RemedyCase, more_devices, remedies
from windlass.tasks.plan.training.search import something_fits
from windlass.tasks.plan.training.time.candidates import predict_step

pytestmark = pytest.mark.pure

Model = Callable[[str], tuple[ModelSpec, tuple[Rule, ...]]]
LLAMA_8B, LLAMA_70B, GLM = "meta-llama--Llama-3.1-8B", "meta-llama--Meta-Llama-3.1-70B", "zai-org--GLM-4.6"


def plan(model: Model, name: str, on: str, **sections: dict[str, Any]) -> TrainingPlan:
    spec, rules = model(name)
    return plan_training(spec, rules, parse_hardware(on), recipe_from({"model": {"name": "x"}, **sections}))


def test_pins_are_loosened_one_by_one(model: Model) -> None:
    pins: dict[str, Any] = {
        "batch": {"micro_batch": 8},
        "parallel": {"tp": 8, "pp": 4, "zero": 0, "virtual_stages": 5},
        "memory": {"recompute": "none"},
    }
    on = "8x(8xH100-80GB)@400Gb"
    told = plan(model, LLAMA_70B, on, **pins)
    assert not told.fits
    assert told.would_fit[:2] == ('memory.recompute = "full"', "batch.micro_batch = 1")
    assert "parallel.zero = 1" not in told.would_fit  # states are not what is too much here
    assert plan(model, LLAMA_70B, on, **{**pins, "memory": {"recompute": "full"}}).fits
    assert plan(model, LLAMA_70B, on, **{**pins, "batch": {"micro_batch": 1}}).fits


def test_more_devices_are_counted_by_trying(model: Model) -> None:
    told = plan(model, GLM, "8xH100-80GB")
    assert told.would_fit == ("16 times the devices (16x(8xH100-80GB)@400Gb)",)
    assert plan(model, GLM, "16x(8xH100-80GB)@400Gb").fits
    assert not plan(model, GLM, "8x(8xH100-80GB)@400Gb").fits


def test_offload_is_offered_where_the_host_has_room(model: Model) -> None:
    """ZeRO-3 offload holds 1.5 x 18 bytes a parameter: 217 GB for 8B."""
    assert not any("offload" in text for text in plan(model, LLAMA_8B, "1xH100-80GB,ram=200GB").would_fit)
    assert any("offload" in text for text in plan(model, LLAMA_8B, "1xH100-80GB,ram=256GB").would_fit)
    assert plan(model, LLAMA_8B, "1xH100-80GB,ram=256GB", memory={"offload": "cpu"}).fits


def test_the_optimizer_leaves_beside_tp(model: Model) -> None:
    """Megatron-Core's optimizer on the host: 12 + 4 bytes a parameter there, 6 on the device, and the link takes its time."""
    on, pins = "8xH100-80GB,ram=2TB", {"parallel": {"tp": 8}}
    assert not plan(model, LLAMA_70B, on, **pins).fits
    made = plan(model, LLAMA_70B, on, **pins, memory={"offload": "cpu"})
    assert made.fits
    assert made.memory.optimizer_bytes == 0
    assert made.memory.host_bytes / (made.memory.weights_bytes / 2) == pytest.approx(16)
    assert made.memory.gradients_bytes == 2 * made.memory.weights_bytes
    spec, rules = model(LLAMA_70B)
    hardware = parse_hardware(on)
    stays = predict_step(spec, rules, hardware, msgspec.structs.replace(made.job, offload="none")).optimizer
    assert made.breakdown is not None
    assert made.breakdown.optimizer - stays > 6 * made.memory.weights_bytes / 2 / hardware.devices[0].host_bandwidth / 2


def test_offload_has_its_limits(model: Model) -> None:
    with pytest.raises(Impossible, match="nvme is DeepSpeed"):
        plan(model, LLAMA_70B, "8xH100-80GB", parallel={"tp": 8}, memory={"offload": "nvme"})
    with pytest.raises(Impossible, match="has no effect on CPUs"):
        plan(model, LLAMA_8B, "cpu:16,ram=64GB", memory={"offload": "cpu"})


def test_several_pins_at_once(model: Model) -> None:
    """Neither a smaller micro-batch nor ZeRO alone helps; letting go of both does."""
    pins: dict[str, Any] = {
        "batch": {"micro_batch": 16},
        "parallel": {"tp": 1, "pp": 1, "zero": 0},
        "memory": {"recompute": "none"},
    }
    told = plan(model, LLAMA_8B, "8xH100-80GB", **pins)
    assert "leave tp, pp, zero, micro_batch, recompute to the planner" in told.would_fit
    assert "batch.micro_batch = 1" not in told.would_fit


def test_it_looks_at_few_clusters(model: Model, counted: Callable[[Callable[[], Any]], tuple[Any, Counter[str]]]) -> None:
    """Each is asked whether anything fits, by the leanest jobs alone: five were, until eight times the devices did."""
    spec, rules = model("deepseek-ai--DeepSeek-V3")
    case = RemedyCase(
        spec=spec, rules=rules, hardware=parse_hardware("16x(8xRTX-4090)@100Gb"), recipe=recipe_from({"model": {"name": "x"}})
    )
    found, calls = counted(lambda: remedies(case))
    assert found
    assert 0 < calls["something_fits"] <= 8 and not calls["search_jobs"]


def test_more_devices_fill_the_node_first() -> None:
    one = parse_hardware("1xH100-80GB")
    assert [more_devices(one, times).num_devices for times in (2, 8, 16)] == [2, 8, 16]
    assert [len(more_devices(one, times).nodes) for times in (2, 8, 16)] == [1, 1, 2]
    assert parse_hardware(more_devices(one, 16).description).num_devices == 16
    assert len(more_devices(parse_hardware("cpu:4,ram=8GB"), 2).nodes) == 2


def test_lean_and_full_searches_agree_on_what_fits(model: Model) -> None:
    spec, rules = model("zai-org--GLM-4.5-Air")
    for count in (1, 2, 4, 8):
        hardware, recipe = parse_hardware(f"{count}x(8xH100-80GB)@400Gb"), recipe_from({"model": {"name": "x"}})
        assert something_fits(spec, rules, hardware, recipe) == plan_training(spec, rules, hardware, recipe).fits
