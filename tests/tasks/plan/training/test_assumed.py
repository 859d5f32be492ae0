"""What the planner assumes and says of a run: framework, loss, optimizer states, defaults for adapters, warnings and remedies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from windlass.core.hardware.parse import parse_hardware
from windlass.core.layout import training_groups
from windlass.core.model import ModelSpec
from windlass.core.recipe.recipe import recipe_from
from windlass.core.rule import Rule
from windlass.errors import BadInput, Impossible
from windlass.tasks.plan.training.job import TrainingJob
from windlass.tasks.plan.training.memory.activations import layer_bytes
from windlass.tasks.plan.training.memory.footprint import device_bytes
from windlass.tasks.plan.training.memory.states import job_bytes, parameter_bytes
from windlass.tasks.plan.training.plan import TrainingPlan, plan_training
from windlass.tasks.plan.training.time.candidates import predict_step
from windlass.tasks.plan.training.work.layers import logits_bytes

pytestmark = pytest.mark.pure

Model = Callable[[str], tuple[ModelSpec, tuple[Rule, ...]]]
LLAMA_8B, LLAMA_70B, GLM = "meta-llama--Llama-3.1-8B", "meta-llama--Meta-Llama-3.1-70B", "zai-org--GLM-4.5"


def job(world: int = 8, **changes: Any) -> TrainingJob:
    plain = TrainingJob(
        groups=training_groups(world),
        sequence_tokens=4096,
        global_batch=2 * world,
        micro_batch=2,
        zero=3,
        framework="pytorch",
        loss="whole",
    )
    return msgspec.structs.replace(plain, **changes)


def planned(model: Model, name: str, on: str, **sections: Any) -> TrainingPlan:
    spec, rules = model(name)
    return plan_training(spec, rules, parse_hardware(on), recipe_from({"model": {"name": "x"}, **sections}))


def said(plan: TrainingPlan, choice: str) -> str:
    return "; ".join(f"{reason.value} {reason.why}" for reason in plan.reasons if reason.choice == choice)


@pytest.mark.parametrize(("loss", "bytes_each"), [("whole", 12), ("fused", 4), ("chunked", 12 * 512 / 8192)])
def test_logits(loss: Any, bytes_each: float) -> None:
    assert logits_bytes(1000.0, 8192, loss) == pytest.approx(1000 * bytes_each)


@pytest.mark.parametrize(("states", "total"), [("fp32", 16), ("bf16", 8), ("int8", 6)])
def test_bytes_per_parameter_of_fsdp(states: Any, total: float) -> None:
    """FSDP2 has fp32 shards and no 16-bit weights beside them; states in fewer bits have no fp32 weights at all."""
    gradients = "fp32" if states == "fp32" else "bf16"
    assert job_bytes(job(states=states, gradients=gradients)).total == total
    assert parameter_bytes("bf16", "bf16").total == 16


def test_per_operation_recomputation_lies_between(model: Model) -> None:
    spec, rules = model(LLAMA_8B)
    held = {how: layer_bytes(spec, spec.layers[0], job(recompute=how)) for how in ("none", "selective", "full")}
    assert held["full"] < held["selective"] < held["none"]
    hardware = parse_hardware("8xH100-80GB")
    seconds = {how: predict_step(spec, rules, hardware, job(recompute=how)).step_seconds for how in held}
    assert seconds["none"] < seconds["selective"] < seconds["full"]


def test_frozen_weights_are_sharded_by_zero_3_only(model: Model) -> None:
    spec, rules = model(LLAMA_70B)
    lora = recipe_from({"model": {"name": "x"}, "lora": {"rank": 16}}).lora
    whole = device_bytes(spec, rules, job(lora=lora, zero=2, recompute="full")).states.weights
    shard = device_bytes(spec, rules, job(lora=lora, zero=3, recompute="full")).states.weights
    assert whole == pytest.approx(2 * 70.55e9, rel=0.01)
    assert shard == pytest.approx(whole / 8, rel=0.01)


def test_hybrid_sharding_holds_more_and_gathers_nearer(model: Model) -> None:
    """Shards within a node of eight: twice sixteen devices hold the states of eight, and gather without the network."""
    spec, rules = model(LLAMA_8B)
    hardware = parse_hardware("2x(8xA100-80GB)@25Gb")
    full, hybrid = job(16), job(16, shards=8)
    assert device_bytes(spec, rules, hybrid).states.optimizer == pytest.approx(
        2 * device_bytes(spec, rules, full).states.optimizer
    )
    assert predict_step(spec, rules, hardware, hybrid).dp < predict_step(spec, rules, hardware, full).dp


@pytest.mark.parametrize("shards", [1, 2, 3, 8, 16, 64])
def test_any_number_of_shards_can_be_planned(model: Model, shards: int) -> None:
    """More than there are ranks: all of them."""
    spec, rules = model(LLAMA_8B)
    made = predict_step(spec, rules, parse_hardware("8xH100-80GB"), job(8, shards=shards))
    assert made.dp > 0
    alone = job(1, shards=shards)
    assert predict_step(spec, rules, parse_hardware("1xH100-80GB"), alone).dp == 0


def test_compiled_is_faster_and_frameworks_differ(model: Model) -> None:
    spec, rules = model(LLAMA_8B)
    hardware = parse_hardware("8xH100-80GB")
    eager, compiled = (predict_step(spec, rules, hardware, job(compile=flag)).step_seconds for flag in (False, True))
    assert compiled < eager < 1.5 * compiled


def test_context_parallelism_costs_attention_something(model: Model) -> None:
    spec, rules = model(LLAMA_8B)
    hardware = parse_hardware("8xH100-80GB")
    long = job(sequence_tokens=65_536, micro_batch=1, global_batch=8, recompute="full")
    alone = predict_step(spec, rules, hardware, long)
    ring = predict_step(spec, rules, hardware, msgspec.structs.replace(long, groups=training_groups(8, cp=2)))
    assert ring.step_seconds > alone.step_seconds


def test_adapters_do_not_take_the_batch_of_pre_training(model: Model) -> None:
    tuned = planned(model, LLAMA_8B, "8xH100-80GB", lora={"rank": 16})
    assert tuned.job.global_batch == 64
    assert tuned.run.tokens == 100_000_000
    assert "adapters and tuning" in said(tuned, "batch")
    assert planned(model, LLAMA_8B, "8xH100-80GB").job.global_batch == 512


def test_remedies_of_adapters(model: Model) -> None:
    """GLM-4.5 is 706 GB in 16 bits: sixteen devices hold it, and eight do in 8 bits."""
    made = planned(model, GLM, "8xH100-80GB", lora={"rank": 16})
    assert not made.fits
    assert any(text.startswith("2 times the devices") for text in made.would_fit)
    assert 'lora.base = "int8"' in made.would_fit
    assert planned(model, GLM, "8xH100-80GB", lora={"rank": 16, "base": "int8"}).fits


def test_weights_that_are_given_can_get_adapters(model: Model) -> None:
    made = plan_training(
        *model(LLAMA_70B), parse_hardware("2xH100-80GB"), recipe_from({"model": {"name": "x", "start": "weights"}})
    )
    assert any("lora.rank = 16" in text for text in made.would_fit)


def test_absurd_runs_are_called_so(model: Model) -> None:
    made = planned(model, LLAMA_70B, "8xH200", data={"tokens": "15T"}, lora={"rank": 16})
    assert "years" in said(made, "warning")
    assert not said(planned(model, LLAMA_8B, "8xH100-80GB", data={"tokens": "1B"}), "warning")


def test_thin_margins_are_a_warning_and_avoided(model: Model) -> None:
    made = planned(model, LLAMA_8B, "8xH100-80GB")
    assert made.memory.total_bytes <= 0.98 * made.memory.capacity_bytes
    tight = round(1.01 * made.memory.total_bytes)
    only = {
        "batch": {"micro_batch": made.job.micro_batch},
        "parallel": {"tp": 1, "pp": 1, "zero": made.job.zero},
        "memory": {"recompute": made.job.recompute},
    }
    assert "is free" in said(planned(model, LLAMA_8B, f"8xH100-80GB[{tight}B]", **only), "warning")


def test_fp8_needs_units_for_it(model: Model) -> None:
    with pytest.raises(Impossible, match="no 8-bit"):
        planned(model, LLAMA_8B, "8xA100-80GB", precision={"compute": "fp8"})
    assert planned(model, LLAMA_8B, "8xH100-80GB", precision={"compute": "fp8"}).fits


def test_mfu_of_adapters_counts_what_they_run(model: Model) -> None:
    made = planned(model, LLAMA_8B, "8xA100-80GB", lora={"rank": 16})
    assert 0.2 < made.model_flops_utilization < 0.65


def test_intervals_are_around_what_is_predicted(model: Model) -> None:
    for on, known in (("8xH100-80GB", True), ("8xRTX-4090", False)):
        made = planned(model, LLAMA_8B, on, lora={"rank": 16})
        assert made.rates is not None
        assert made.intervals.tokens_per_second is not None
        assert made.intervals.known is known
        assert made.intervals.tokens_per_second.low < made.rates.tokens_per_second < made.intervals.tokens_per_second.high
        assert made.intervals.total_bytes.holds(made.memory.total_bytes)
        assert ("no published run" in said(made, "note")) is not known


def test_a_share_is_at_most_one() -> None:
    with pytest.raises(BadInput, match="kept_products"):
        recipe_from({"model": {"name": "x"}, "assume": {"kept_products": 2.0}})
