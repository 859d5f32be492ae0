"""Plans of adapters beside frozen weights: what every device holds, what a checkpoint is, and what the backward leaves out."""

from __future__ import annotations

from typing import Any

import pytest

from windlass.core.hardware.parse import parse_hardware
from windlass.core.recipe.recipe import recipe_from
from windlass.core.recipe.sections import LoraSection
from windlass.model.families import rules
from windlass.model.families.registry import find, spec_of
from windlass.tasks.plan.training.memory.states import adapter_elements
from windlass.tasks.plan.training.plan import Prices, TrainingPlan, plan_training

pytestmark = pytest.mark.pure

KNOWN = find("GLM-4.5-Air")
assert KNOWN is not None
SPEC = spec_of(KNOWN)
RULES = rules(SPEC)
GIB = 2**30


def planned(**lora: Any) -> TrainingPlan:
    recipe = recipe_from(
        {
            "model": {"name": "GLM-4.5-Air", "start": "weights"},
            "data": {"sequence_length": 4096},
            "batch": {"global_batch": 64, "micro_batch": 1},
            "parallel": {"tp": 1, "pp": 1, "ep": 1, "cp": 1, "zero": 0},
            "memory": {"recompute": "full"},
            "lora": lora,
        }
    )
    return plan_training(SPEC, RULES, parse_hardware("8xH100-80GB"), recipe, Prices())


def test_frozen_weights_are_held_as_they_are_stored() -> None:
    """106.9B weights: int4 in groups of 128 takes 0.516 bytes each and fits one H100; 16 bits do not."""
    packed = planned(rank=16, base="int4")
    assert packed.fits and 50 * GIB < packed.memory.weights_bytes < 56 * GIB
    assert packed.memory.gradients_bytes + packed.memory.optimizer_bytes < GIB
    assert not planned(rank=16, base="bf16").fits and not planned().fits


def test_a_checkpoint_holds_the_adapters_alone() -> None:
    """q, k, v and o of 46 layers at rank 16: 16 x (in + out) each."""
    attention = SPEC.layers[0].mixer
    heads, kv_heads, hidden = (
        attention.num_heads * attention.head_dim,
        attention.num_kv_heads * attention.head_dim,
        SPEC.hidden_size,
    )  # type: ignore[union-attr]
    expected = 16 * SPEC.num_layers * (2 * (hidden + heads) + 2 * (hidden + kv_heads))
    assert sum(adapter_elements(rule, LoraSection(rank=16)) * rule.copies for rule in RULES) == expected
    assert planned(rank=16, base="int4").checkpoint.bytes == expected * 14


def test_targets() -> None:
    none = LoraSection(rank=8, targets=("experts",))
    found = {rule.ours for rule in RULES if adapter_elements(rule, none)}
    assert found and all(".experts." in name for name in found)
    assert not any(adapter_elements(rule, LoraSection()) for rule in RULES)


def test_the_backward_has_half_the_products() -> None:
    from windlass.core.layout import TrainingGroups
    from windlass.tasks.plan.training.job import TrainingJob
    from windlass.tasks.plan.training.time.layer import device_rates, kernels
    from windlass.tasks.plan.training.work.operation import matmul

    groups = TrainingGroups(tp=1, cp=1, pp=1, dp=1, ep=1, expert_tp=1, expert_dp=1)
    job = TrainingJob(groups=groups, sequence_tokens=4096, global_batch=1, micro_batch=1)
    frozen = TrainingJob(groups=groups, sequence_tokens=4096, global_batch=1, micro_batch=1, lora=LoraSection(rank=8))
    machine = device_rates(parse_hardware("1xH100-80GB"), "bf16")
    work = [matmul("product", 4096, 4096, 4096, compute="bf16", saved_bytes=0.0)]
    assert kernels(work, frozen, machine).backward_compute < 0.55 * kernels(work, job, machine).backward_compute
