"""Memory against arXiv 2205.05198 (figure 1, figure 7, table 2), the ZeRO table and DeepSpeed's offload."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from stage_memory import stage_activations, stage_states

from windlass.core.layout import training_groups
from windlass.core.model import ModelSpec
from windlass.core.recipe.sections import Compute, GradientType, Recompute
from windlass.core.rule import Rule
from windlass.tasks.plan.training.job import TrainingJob
from windlass.tasks.plan.training.memory.activations import layer_bytes
from windlass.tasks.plan.training.memory.states import parameter_bytes, spread_bytes, stage_elements
from windlass.tasks.plan.training.stages import split_layers, stages
from windlass.units import GIB

pytestmark = pytest.mark.pure

Gpt = Callable[[int, int, int], tuple[ModelSpec, tuple[Rule, ...]]]

FIGURE_1 = {
    # hidden, layers, heads, pp, v, micro-batch: params+optimizer | activations none | SP + selective, GiB
    "22B": ((6144, 48, 64), (1, 1, 4), (45.5625, 59.25, 9.5625)),
    "175B": ((12288, 96, 96), (8, 3, 1), (45.5625, 66.84375, 12.3515625)),
    "530B": ((20480, 105, 128), (35, 3, 1), (31.640625, 114.0234375, 23.076171875)),
    "1T": ((25600, 128, 160), (64, 1, 1), (32.958984375, 131.25, 26.5625)),
}
FIGURE_7 = {"22B": (66.84, 49.42, 16.18, 7.64), "175B": (62.04, 56.53, 18.49, 8.71), "530B": (58.31, 62.04, 20.27, 9.42)}


def make_job(pipeline: tuple[int, int, int], *, sequence_parallel: bool, recompute: Recompute) -> TrainingJob:
    pp, virtual, micro = pipeline
    return TrainingJob(
        groups=training_groups(8 * pp, tp=8, pp=pp),
        sequence_tokens=2048,
        global_batch=micro * pp * 10,
        micro_batch=micro,
        virtual_stages=virtual,
        zero=0,
        sequence_parallel=sequence_parallel,
        recompute=recompute,
        flash_attention=False,
    )


def layers_gib(spec: ModelSpec, job: TrainingJob) -> float:
    return stage_activations(spec, job, stages(spec, job.groups.pp)[0], 0).layers / GIB


@pytest.mark.parametrize("name", FIGURE_1)
def test_figure_1_exactly(name: str, gpt: Gpt) -> None:
    shape, pipeline, (states, none, selective) = FIGURE_1[name]
    spec, rules = gpt(*shape)
    plain = make_job(pipeline, sequence_parallel=False, recompute="none")
    stage = stages(spec, plain.groups.pp)[0]
    assert stage_elements(spec, rules, plain, stage).matrices * parameter_bytes().total / GIB == states
    assert layers_gib(spec, plain) == none
    assert layers_gib(spec, make_job(pipeline, sequence_parallel=True, recompute="selective")) == selective


@pytest.mark.parametrize("name", FIGURE_7)
def test_figure_7(name: str, gpt: Gpt) -> None:
    """Percent of the activations without any technique; the figure was measured, so to 1.5 % of what it prints."""
    (shape, pipeline, _), printed = FIGURE_1[name], FIGURE_7[name]
    spec, _ = gpt(*shape)
    full = layers_gib(spec, make_job(pipeline, sequence_parallel=False, recompute="none"))
    ways: list[tuple[bool, Recompute]] = [(True, "none"), (False, "selective"), (True, "selective"), (False, "full")]
    for (sequence_parallel, recompute), percent in zip(ways, printed, strict=True):
        held = layers_gib(spec, make_job(pipeline, sequence_parallel=sequence_parallel, recompute=recompute))
        assert 100 * held / full == pytest.approx(percent, rel=0.015)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("micro", [1, 3])
def test_table_2_formulas(tp: int, micro: int, gpt: Gpt) -> None:
    """sbh(10 + 24/t + 5as/ht); sbh/t (34 + 5as/h); 34 sbh/t; 2 sbh."""
    hidden, heads, length = 2048, 16, 1024
    spec, _ = gpt(hidden, 2, heads)
    sbh, scores = length * micro * hidden, 5 * heads * length / hidden

    def held(sequence_parallel: bool, recompute: Recompute, flash: bool = False) -> float:
        job = TrainingJob(
            groups=training_groups(tp, tp=tp),
            sequence_tokens=length,
            global_batch=micro,
            micro_batch=micro,
            sequence_parallel=sequence_parallel,
            recompute=recompute,
            flash_attention=flash,
        )
        return layer_bytes(spec, spec.layers[0], job)

    assert held(False, "none") == pytest.approx(sbh * (10 + 24 / tp + scores / tp), rel=1e-12)
    assert held(True, "none") == pytest.approx(sbh / tp * (34 + scores), rel=1e-12)
    assert held(True, "selective") == pytest.approx(34 * sbh / tp, rel=1e-12)
    assert held(False, "full") == 2 * sbh
    log_sums = 4 * length * micro * heads / tp
    assert held(True, "none", flash=True) == pytest.approx(34 * sbh / tp + log_sums, rel=1e-12)


@pytest.mark.parametrize(
    ("compute", "gradients", "whole", "kept", "spread"),
    [("fp16", "fp16", 20, 4, 16), ("bf16", "fp32", 18, 6, 12), ("fp32", "fp32", 16, 8, 8)],
)
def test_distributed_optimizer_table(compute: Compute, gradients: GradientType, whole: float, kept: float, spread: float) -> None:
    """Megatron-LM docs/user-guide/features/dist_optimizer.md."""
    each = parameter_bytes(compute, gradients)
    assert each.total == whole
    for ranks in (1, 4, 64):
        assert spread_bytes(each, 1, ranks).total == kept + spread / ranks


@pytest.mark.parametrize(("zero", "kept", "spread"), [(0, 18, 0), (1, 6, 12), (2, 2, 16), (3, 0, 18)])
def test_zero_table(zero: int, kept: float, spread: float) -> None:
    """18; 6 + 12/d; 2 + 16/d; 18/d (arXiv 1910.02054 with fp32 gradients)."""
    for ranks in (1, 8, 512):
        assert spread_bytes(parameter_bytes(), zero, ranks).total == pytest.approx(kept + spread / ranks)


def test_experts_have_their_own_groups(model: Callable[[str], tuple[ModelSpec, tuple[Rule, ...]]]) -> None:
    """Experts are divided by ep and their states by expert-dp; everything else by tp and dp * cp."""
    spec, rules = model("deepseek-ai--DeepSeek-V3")
    groups = training_groups(1024, tp=2, pp=8, ep=64)
    job = TrainingJob(groups=groups, sequence_tokens=4096, global_batch=8192, micro_batch=1)
    whole = TrainingJob(groups=training_groups(1), sequence_tokens=4096, global_batch=1, micro_batch=1)
    routed = sum(stage_elements(spec, rules, job, stage).experts for stage in stages(spec, 8))
    assert routed * 64 == stage_elements(spec, rules, whole, stages(spec, 1)[0]).experts
    stage = stages(spec, 8)[3]
    elements, states = stage_elements(spec, rules, job, stage), stage_states(spec, rules, job, stage)
    assert states.optimizer == pytest.approx(12 * (elements.dense / 64 + elements.experts / 2))


def test_offload_moves_states_to_the_host(gpt: Gpt) -> None:
    """DeepSpeed stage3.py: 18 N / nodes * 1.5 on the host, a layer on the device."""
    spec, rules = gpt(2048, 24, 16)
    job = TrainingJob(groups=training_groups(8), sequence_tokens=1024, global_batch=8, micro_batch=1, zero=3, offload="cpu")
    stage = stages(spec, 1)[0]
    states, elements = stage_states(spec, rules, job, stage), stage_elements(spec, rules, job, stage)
    assert states.host * 8 == pytest.approx(1.5 * 18 * elements.total)
    assert states.device == pytest.approx(4 * elements.total / 24)


def test_uneven_stages_leave_the_ends_short() -> None:
    assert split_layers(126, 16) == (7, *[8] * 14, 7)
    assert split_layers(61, 16) == (3, *[4] * 13, 3, 3)
    assert split_layers(96, 8) == (12,) * 8
