"""A batch in tokens is a wish, one in sequences is not, and the default grows with the machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.hardware.parse import parse_hardware
from windlass.core.model import ModelSpec
from windlass.core.recipe.recipe import recipe_from
from windlass.core.recipe.sections import BatchSection
from windlass.core.rule import Rule
from windlass.errors import Impossible
from windlass.tasks.plan.training.batch import choose_batch, default_tokens, nearest_sequences
from windlass.tasks.plan.training.plan import TrainingPlan, plan_training

pytestmark = pytest.mark.pure

Model = Callable[[str], tuple[ModelSpec, tuple[Rule, ...]]]
LLAMA_405B = "meta-llama--Meta-Llama-3.1-405B"


def reason(plan: TrainingPlan, choice: str) -> str:
    return next(f"{told.value} {told.why}" for told in plan.reasons if told.choice == choice)


@pytest.mark.parametrize(
    ("tokens", "sequence", "replicas", "sequences"),
    [
        (16_000_000, 8192, {128}, 2048),  # Llama 3: "16M", 2,048 sequences
        (4_000_000, 4096, {1, 2, 4, 8, 16}, 1024),
        (2_500_000, 4096, {1, 2, 4}, 640),
        (16_000_000, 8192, {9}, 2016),  # 2,520 devices, tp 8, pp 35
        (1_000_000, 8192, {2048}, 2048),  # pinned to so many replicas: nothing smaller divides
        (1000, 4096, {1, 2}, 1),
    ],
)
def test_nearest_that_divides(tokens: int, sequence: int, replicas: set[int], sequences: int) -> None:
    made = choose_batch(BatchSection(tokens=tokens), 0, sequence, replicas)
    assert (made.sequences, made.how) == (sequences, "nearest")


@given(st.floats(1, 1e6), st.sets(st.integers(1, 4096), min_size=1, max_size=8))
def test_something_always_divides_and_is_near(wanted: float, replicas: set[int]) -> None:
    made = nearest_sequences(wanted, replicas)
    assert any(made % parts == 0 for parts in replicas)
    assert abs(made - wanted) <= max(wanted / 8, min(replicas))


def test_defaults() -> None:
    mebi = 2**20
    assert default_tokens(135_000_000, 1, 4096) == mebi // 2
    assert default_tokens(8_000_000_000, 8, 8192) == 2 * mebi
    assert default_tokens(405_000_000_000, 8, 8192) == 4 * mebi
    assert default_tokens(405_000_000_000, 16_384, 8192) == 64 * mebi
    assert default_tokens(355_000_000_000, 1024, 4096) == 16 * mebi


def test_the_run_of_llama_3(model: Model) -> None:
    """16M tokens of 8k on 16,384 H100s with tp 8 and pp 16 (arXiv 2407.21783, table 4)."""
    spec, rules = model(LLAMA_405B)
    asked = {
        "model": {"name": "x"},
        "data": {"sequence_length": "8k"},
        "batch": {"tokens": "16M"},
        "parallel": {"tp": 8, "pp": 16},
    }
    plan = plan_training(spec, rules, parse_hardware("2048x(8xH100-80GB)@400Gb"), recipe_from(asked))
    assert plan.fits
    assert (plan.job.global_batch, plan.layout.dp) == (2048, 128)
    assert "2,048 sequences = 16.78M tokens, the nearest to 16.00M that is divisible" in reason(plan, "batch")
    assert "pipeline bubble is" in reason(plan, "batch")
    assert 0.3 < plan.model_flops_utilization < 0.45


def test_the_default_keeps_large_machines_busy(model: Model) -> None:
    spec, rules = model(LLAMA_405B)
    asked = recipe_from({"model": {"name": "x"}, "data": {"sequence_length": "8k"}})
    plan = plan_training(spec, rules, parse_hardware("2048x(8xH100-80GB)@400Gb"), asked)
    assert plan.model_flops_utilization > 0.32  # PyTorch's efficiency; Megatron's would be 0.42
    assert "the default for this model on 16,384 devices" in reason(plan, "batch")


def test_sequences_stay_exact(model: Model) -> None:
    spec, rules = model(LLAMA_405B)
    hardware = parse_hardware("128x(8xH100-80GB)@400Gb")
    pinned = {"model": {"name": "x"}, "parallel": {"tp": 8, "pp": 8}}
    assert plan_training(spec, rules, hardware, recipe_from({**pinned, "batch": {"global_batch": 48}})).job.global_batch == 48
    with pytest.raises(Impossible, match="50 is not a multiple of 16"):
        plan_training(spec, rules, hardware, recipe_from({**pinned, "batch": {"global_batch": 50}}))


def test_a_huge_batch_is_no_hang(model: Model) -> None:
    spec, rules = model("meta-llama--Llama-3.1-8B")
    asked = recipe_from({"model": {"name": "x"}, "batch": {"global_batch": 10**17}})
    assert plan_training(spec, rules, parse_hardware("8xH200"), asked).fits
