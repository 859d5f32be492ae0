"""How n-D parallelism is counted (Megatron-Core parallel_state), on layouts people run."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from windlass.core.layout import training_groups
from windlass.core.model import ModelSpec
from windlass.core.rule import Rule
from windlass.errors import Impossible
from windlass.tasks.plan.training.feasible import why_not, why_not_tp
from windlass.tasks.plan.training.job import TrainingJob

pytestmark = pytest.mark.pure

Model = Callable[[str], tuple[ModelSpec, tuple[Rule, ...]]]


def test_slime_on_64() -> None:
    """GLM-4.7 by slime: tp 8, pp 4, cp 2, ep 16."""
    groups = training_groups(64, tp=8, pp=4, cp=2, ep=16)
    assert (groups.dp, groups.expert_dp) == (1, 1)


def test_dgxc_on_1024() -> None:
    """DeepSeek-V3 by dgxc-benchmarking: tp 2, pp 8, ep 64."""
    groups = training_groups(1024, tp=2, pp=8, ep=64)
    assert (groups.dp, groups.expert_dp) == (64, 2)


def test_the_guides_formula_is_not_ours() -> None:
    """Its own row, 1,024 GPUs with tp 2, pp 16, ep 64, breaks TP x PP x CP x EP x DP = GPUs (2,048 already), and is accepted here."""
    groups = training_groups(1024, tp=2, pp=16, ep=64)
    assert groups.world == 1024
    assert groups.tp * groups.pp * groups.ep > 1024


def test_what_does_not_divide_is_refused(model: Model) -> None:
    with pytest.raises(Impossible, match="ep 96 does not fit"):
        training_groups(64, tp=8, ep=96)
    spec, _ = model("meta-llama--Llama-2-70b-hf")
    assert "64 heads are not a multiple of 6" in (why_not_tp(spec, 6) or "")
    falcon, _ = model("tiiuae--falcon-180B")
    assert "232 heads" in (why_not_tp(falcon, 12) or "")


def make(model: Model, name: str, world: int, batch: int = 256, **degrees: int) -> tuple[ModelSpec, TrainingJob]:
    spec, _ = model(name)
    return spec, TrainingJob(groups=training_groups(world, **degrees), sequence_tokens=4096, global_batch=batch, micro_batch=1)


def test_refusals_speak_of_the_model(model: Model) -> None:
    spec, job = make(model, "zai-org--GLM-4.6", 48, ep=48)
    assert "ep 48 does not divide 160 experts" in (why_not(spec, job) or "")
    spec, job = make(model, "meta-llama--Llama-2-70b-hf", 8, ep=8)
    assert "no routed experts" in (why_not(spec, job) or "")
    spec, job = make(model, "meta-llama--Llama-2-70b-hf", 96, pp=96)
    assert "is more than the model's 80 layers" in (why_not(spec, job) or "")
    spec, job = make(model, "meta-llama--Llama-2-70b-hf", 8, batch=12)
    assert "not a multiple of 8" in (why_not(spec, job) or "")


def test_tp_with_ep_needs_sequence_parallelism(model: Model) -> None:
    spec, job = make(model, "zai-org--GLM-4.5-Air", 16, tp=2, ep=8)
    assert why_not(spec, job) is None
    assert "sequence parallelism" in (why_not(spec, msgspec.structs.replace(job, sequence_parallel=False)) or "")
