"""What must hold whatever the numbers."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stage_memory import stage_activations

from windlass.core.hardware.parse import parse_hardware
from windlass.core.layout import training_groups
from windlass.core.model import ModelSpec
from windlass.core.recipe.sections import Recompute
from windlass.core.rule import Rule
from windlass.model.families import describe, rules
from windlass.tasks.plan.training.job import TrainingJob
from windlass.tasks.plan.training.memory.states import parameter_bytes, spread_bytes, stage_elements
from windlass.tasks.plan.training.stages import split_layers, stages
from windlass.tasks.plan.training.time.candidates import predict_step
from windlass.tasks.plan.training.time.rates import flops_per_token
from windlass.tasks.plan.training.work.layers import head_operations, layer_operations
from windlass.tasks.plan.training.work.operation import OperationKind

pytestmark = pytest.mark.pure

CONFIGS = Path(__file__).parents[4] / "src" / "windlass" / "model" / "families" / "configs"


def read(name: str) -> tuple[ModelSpec, tuple[Rule, ...]]:
    spec = describe(json.loads((CONFIGS / f"{name}.json").read_text()), name)
    return spec, rules(spec)


MODELS = {
    name: read(name)
    for name in (
        "zai-org--GLM-4.5-Air",
        "meta-llama--Meta-Llama-3.1-70B",
        "deepseek-ai--DeepSeek-V3",
        "Qwen--Qwen3-235B-A22B",
        "bigscience--bloom",
    )
}
NAMES = st.sampled_from(sorted(MODELS))
DEGREES = st.sampled_from([1, 2, 4, 8])


@st.composite
def jobs(draw: st.DrawFn) -> tuple[str, TrainingJob]:
    name = draw(NAMES)
    tp, pp = draw(st.sampled_from([1, 2, 4])), draw(DEGREES)
    dp, micro = draw(DEGREES), draw(st.sampled_from([1, 2, 4]))
    groups = training_groups(tp * pp * dp, tp=tp, pp=pp, ep=draw(st.sampled_from([1, tp * dp])) if MODELS[name][0].experts else 1)
    job = TrainingJob(
        groups=groups,
        sequence_tokens=draw(st.sampled_from([512, 2048, 8192])),
        global_batch=dp * micro * draw(st.integers(1, 40)),
        micro_batch=micro,
        sequence_parallel=draw(st.booleans()),
        flash_attention=draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
    )
    return name, job


@given(st.integers(1, 400), st.data())
def test_every_layer_is_on_one_stage(num_layers: int, data: st.DataObject) -> None:
    pp = data.draw(st.integers(1, num_layers))
    made = split_layers(num_layers, pp)
    assert sum(made) == num_layers
    assert max(made) - min(made) <= 1
    assert made[0] == min(made) or made[-1] == min(made)


@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(0, 2))
def test_states_fall_with_zero_and_ranks(ranks: int, more: int, zero: int) -> None:
    each = parameter_bytes()
    assert spread_bytes(each, zero + 1, ranks).total <= spread_bytes(each, zero, ranks).total
    assert spread_bytes(each, zero, ranks * more).total <= spread_bytes(each, zero, ranks).total


@given(jobs())
def test_stages_hold_the_whole_model(drawn: tuple[str, TrainingJob]) -> None:
    """Every rank of a stage together holds its tensors at least once; tied tables and copied KV heads may be there twice."""
    spec, tensor_rules = MODELS[drawn[0]]
    groups = drawn[1].groups
    made = [stage_elements(spec, tensor_rules, drawn[1], stage) for stage in stages(spec, groups.pp)]
    one = TrainingJob(groups=training_groups(1), sequence_tokens=512, global_batch=1, micro_batch=1)
    whole = stage_elements(spec, tensor_rules, one, stages(spec, 1)[0])
    assert sum(held.experts for held in made) * groups.ep * groups.expert_tp == pytest.approx(whole.experts)
    assert sum(held.dense for held in made) * groups.tp >= whole.dense * (1 - 1e-9)


@given(jobs())
def test_recomputation_never_keeps_more(drawn: tuple[str, TrainingJob]) -> None:
    name, job = drawn
    spec, stage = MODELS[name][0], stages(MODELS[name][0], job.groups.pp)[0]
    ways: list[Recompute] = ["none", "selective", "full"]
    kept = [stage_activations(spec, msgspec.structs.replace(job, recompute=way), stage, 0).layers for way in ways]
    assert kept[0] >= kept[1] >= kept[2] > 0


@given(jobs())
def test_techniques_only_help_memory(drawn: tuple[str, TrainingJob]) -> None:
    name, job = drawn
    spec, stage = MODELS[name][0], stages(MODELS[name][0], job.groups.pp)[0]

    def kept(**changes: object) -> float:
        return stage_activations(spec, msgspec.structs.replace(job, **changes), stage, 0).layers

    assert kept(sequence_parallel=True) <= kept(sequence_parallel=False)
    if job.recompute == "none":
        assert kept(flash_attention=True) <= kept(flash_attention=False)


@given(NAMES, st.sampled_from([512, 4096]))
def test_operations_are_the_counted_flops(name: str, length: int) -> None:
    """What the layers' products do is what the tensor rules count, to the padding of experts."""
    spec, tensor_rules = MODELS[name]
    job = TrainingJob(groups=training_groups(1), sequence_tokens=length, global_batch=1, micro_batch=1)
    made = [operation for layer in spec.layers for operation in layer_operations(spec, layer, job)] + list(
        head_operations(spec, job)
    )
    flops = sum(work.flops for operation in made if operation.kind is not OperationKind.MEMORY for work in operation.forward)
    padding = 128 * sum(moe.num_experts * 6 * spec.hidden_size * moe.intermediate_size for moe in spec.moe_layers)
    assert flops - padding == pytest.approx(flops_per_token(spec, tensor_rules, length).model / 3 * length, rel=0.002)


@given(jobs())
def test_no_step_beats_the_measured_ceiling(drawn: tuple[str, TrainingJob]) -> None:
    name, job = drawn
    spec, tensor_rules = MODELS[name]
    world = job.groups.world
    hardware = parse_hardware(f"{world // 8}x(8xH100-80GB)@400Gb" if world >= 16 else f"{world}xH100-80GB")
    step = predict_step(spec, tensor_rules, hardware, job)
    assert all(getattr(step, name) >= 0 for name in step.__struct_fields__)
    flops = flops_per_token(spec, tensor_rules, job.sequence_tokens).model * job.tokens_per_step
    assert flops / step.step_seconds / world < 794e12
