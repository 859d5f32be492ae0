from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from stage_memory import stage_activations, stage_states

from windlass.core.hardware.parse import parse_hardware
from windlass.core.model import ModelSpec
from windlass.core.recipe.recipe import recipe_from
from windlass.core.rule import Rule
from windlass.errors import Impossible
from windlass.tasks.plan.training.feasible import why_not
from windlass.tasks.plan.training.frameworks import efficiency, efficiency_of
from windlass.tasks.plan.training.memory.footprint import CONTEXT_BYTES, Footprints
from windlass.tasks.plan.training.plan import Prices, TrainingPlan, plan_training, train_section
from windlass.tasks.plan.training.search import Breadth, search_jobs
from windlass.tasks.plan.training.stages import stages
from windlass.tasks.plan.training.time.candidates import Evaluator

pytestmark = pytest.mark.pure

Model = Callable[[str], tuple[ModelSpec, tuple[Rule, ...]]]
AIR, LLAMA_8B, LLAMA_405B = "zai-org--GLM-4.5-Air", "meta-llama--Llama-3.1-8B", "meta-llama--Meta-Llama-3.1-405B"
DEEPSEEK = "deepseek-ai--DeepSeek-V3"

BREADTHS: tuple[Breadth, ...] = ("all", "coarse")


@pytest.mark.parametrize(("name", "most_tried", "most_layers"), [(LLAMA_405B, 1500, 100), (DEEPSEEK, 9000, 1700)])
def test_8192_devices_take_a_few_thousand_jobs(
    name: str, most_tried: int, most_layers: int, model: Model, counted: Callable[[Callable[[], Any]], tuple[Any, Counter[str]]]
) -> None:
    """1,044 and 6,242 when this was written, and a layer's operations were worked out 62 and 1,120 times: once for all jobs alike."""
    spec, rules = model(name)
    recipe = recipe_from({"model": {"name": name}, "batch": {"global_batch": 8192}})
    hardware = parse_hardware("1024x(8xH100-80GB)@400Gb")
    found, calls = counted(lambda: search_jobs(spec, rules, hardware, recipe))
    assert found.fitting and len(found.fitting) < found.num_tried < most_tried
    assert 0 < calls["layer_operations"] < most_layers


def test_what_is_found_divides_and_fits(model: Model) -> None:
    spec, rules = model(AIR)
    hardware = parse_hardware("8x(8xH100-80GB)@400Gb")
    found = search_jobs(spec, rules, hardware, recipe_from({"model": {"name": AIR}}))
    capacity = hardware.devices[0].memory_bytes
    times = [made.step.step_seconds for made in found.fitting if made.step]
    assert times == sorted(times)
    assert len(times) == len(found.fitting)
    for made in found.fitting[:50]:
        assert why_not(spec, made.job) is None
        assert made.memory.total <= capacity
        assert made.job.groups.world == 64


def test_the_fast_evaluator_says_what_the_plain_functions_say(model: Model) -> None:
    spec, rules = model(AIR)
    hardware = parse_hardware("8x(8xH100-80GB)@400Gb")
    found = search_jobs(spec, rules, hardware, recipe_from({"model": {"name": AIR}}))
    evaluator = Evaluator(Footprints(spec, rules), hardware, "bf16", efficiency("pytorch", False))
    for made in found.fitting[:: max(len(found.fitting) // 40, 1)]:
        job = made.job
        reserved = efficiency_of(job).reserved
        held = list[float]()
        for index, stage in enumerate(stages(spec, job.groups.pp)):
            states, kept = stage_states(spec, rules, job, stage), stage_activations(spec, job, stage, index).total
            held.append(CONTEXT_BYTES + states.device + kept + reserved * (states.working + kept))
        assert evaluator.memory(job).total == pytest.approx(max(held))


def test_pins_are_kept_and_refused(model: Model) -> None:
    spec, rules = model(AIR)
    hardware = parse_hardware("8x(8xH100-80GB)@400Gb")
    table = {"model": {"name": AIR}, "parallel": {"tp": 4, "pp": 2, "ep": 8, "zero": 1}, "memory": {"recompute": "full"}}
    plan = plan_training(spec, rules, hardware, recipe_from(table))
    assert (plan.layout.tp, plan.layout.pp, plan.layout.ep, plan.layout.dp) == (4, 2, 8, 8)
    assert [reason.why for reason in plan.reasons if reason.choice == "tp"] == ["pinned"]
    for parallel, words in (
        ({"tp": 5}, "96 heads are not a multiple of 5"),
        ({"ep": 7}, "128 experts"),
        ({"pp": 3}, "not a multiple of 3"),
    ):
        with pytest.raises(Impossible, match=words):
            plan_training(spec, rules, hardware, recipe_from({"model": {"name": AIR}, "parallel": parallel}))


def test_the_section_of_the_plan(model: Model) -> None:
    spec, rules = model(LLAMA_8B)
    table = {"model": {"name": LLAMA_8B}, "data": {"tokens": "1T", "sequence_length": "8k"}, "batch": {"global_batch": 128}}
    plan = plan_training(spec, rules, parse_hardware("8xH100-80GB"), recipe_from(table), Prices(usd_per_device_hour=2.0))
    told = train_section(plan)
    first = ["step_seconds", "model_flops_utilization", "days", "states_bytes_per_device", "activation_bytes_per_device"]
    assert list(told)[:5] == first
    assert all(told[key] > 0 for key in first)
    assert 0.3 < plan.model_flops_utilization < 0.8
    assert plan.run.usd == pytest.approx(plan.run.device_hours * 2)
    assert sum(getattr(plan.breakdown, name) for name in plan.breakdown.__struct_fields__) == pytest.approx(plan.step_seconds)  # type: ignore[union-attr]
    again = msgspec.json.decode(msgspec.json.encode(plan), type=TrainingPlan)
    assert again == plan


def test_what_does_not_fit_says_how_much(model: Model) -> None:
    spec, rules = model(LLAMA_8B)
    plan = plan_training(spec, rules, parse_hardware("1xH100-80GB"), recipe_from({"model": {"name": LLAMA_8B}}))
    assert not plan.fits
    assert plan.short_bytes > 50e9 and plan.would_fit[-1].startswith("2 times the devices")
    offloaded = recipe_from({"model": {"name": LLAMA_8B}, "memory": {"offload": "cpu"}})
    assert plan_training(spec, rules, parse_hardware("1xH100-80GB,ram=512GB"), offloaded).fits


def test_unlike_devices_are_refused(model: Model) -> None:
    spec, rules = model(LLAMA_8B)
    with pytest.raises(Impossible, match="equal devices"):
        plan_training(spec, rules, parse_hardware("1xH100-80GB+1xA100-80GB"), recipe_from({"model": {"name": LLAMA_8B}}))


def test_learned_positions_end(model: Model) -> None:
    name = "AI-Sweden-Models--gpt-sw3-40b"
    spec, rules = model(name)
    with pytest.raises(Impossible, match="learned position embeddings"):
        plan_training(
            spec, rules, parse_hardware("8xH100-80GB"), recipe_from({"model": {"name": name}, "data": {"sequence_length": 4096}})
        )


def test_longer_than_the_models_context(model: Model) -> None:
    spec, rules = model(AIR)
    hardware = parse_hardware("64x(8xH100-80GB)@400Gb")
    asked = {"model": {"name": AIR}, "data": {"sequence_length": "256k"}}
    with pytest.raises(Impossible, match=r"262,144 exceeds the 131,072 tokens"):
        plan_training(spec, rules, hardware, recipe_from(asked))
    allowed = recipe_from({**asked, "data": {"sequence_length": "256k", "allow_longer_context": True}})
    plan = plan_training(spec, rules, hardware, allowed)
    assert any(told.choice == "sequence" and "131,072" in told.why for told in plan.reasons)


def test_leaving_out_what_is_dominated_loses_nothing(model: Model) -> None:
    """Where less recomputation or a lower stage of ZeRO fits too, the rest of the ladder is not tried; pinning it shows why."""
    spec, rules = model(AIR)
    hardware = parse_hardware("8x(8xH100-80GB)@400Gb")
    best = search_jobs(spec, rules, hardware, recipe_from({"model": {"name": AIR}})).fitting[0].step
    assert best is not None
    for zero in (1, 2):
        for recompute in ("none", "full"):
            table = {"model": {"name": AIR}, "parallel": {"zero": zero}, "memory": {"recompute": recompute}}
            for made in search_jobs(spec, rules, hardware, recipe_from(table)).fitting[:1]:
                assert made.step is not None
                assert made.step.step_seconds >= best.step_seconds * (1 - 1e-12)


def test_a_coarse_search_is_nearly_as_good(model: Model) -> None:
    spec, rules = model(AIR)
    hardware = parse_hardware("16x(8xH100-80GB)@400Gb")
    fine, coarse = (search_jobs(spec, rules, hardware, recipe_from({"model": {"name": AIR}}), breadth=how) for how in BREADTHS)
    assert fine.fitting[0].step is not None
    assert coarse.fitting[0].step is not None
    assert coarse.num_tried < fine.num_tried
    assert coarse.fitting[0].step.step_seconds < 1.05 * fine.fitting[0].step.step_seconds
