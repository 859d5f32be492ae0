"""The choice of experts in C++ is PyTorch's; among equals the first expert wins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from windlass.core.model import Router, Scoring
from windlass.runtime.kernels.cpu import route as native_route
from windlass.runtime.kernels.ops.route import reference

pytestmark = pytest.mark.cpu
SETTINGS = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

Run = Callable[..., tuple[Tensor, ...]]


@SETTINGS
@given(
    rows=st.integers(1, 30),
    experts=st.sampled_from((4, 8, 16, 64, 128, 160, 256)),
    active=st.integers(1, 4),
    scoring=st.sampled_from(list(Scoring)),
    corrected=st.booleans(),
    renormalize=st.booleans(),
    groups=st.sampled_from(((1, 1), (2, 1), (4, 2))),
    scale=st.sampled_from((1.0, 2.5)),
    seed=st.integers(0, 999),
)
@example(
    rows=3, experts=256, active=8, scoring=Scoring.SIGMOID, corrected=True, renormalize=True, groups=(8, 4), scale=2.5, seed=0
)
@example(
    rows=3, experts=4, active=1, scoring=Scoring.SOFTMAX, corrected=False, renormalize=True, groups=(4, 2), scale=1.0, seed=0
)
def test_it_equals_the_reference(
    rows: int,
    experts: int,
    active: int,
    scoring: Scoring,
    corrected: bool,
    renormalize: bool,
    groups: tuple[int, int],
    scale: float,
    seed: int,
    run: Run,
) -> None:
    draw = torch.Generator().manual_seed(seed)
    active = min(active, experts // groups[0] * groups[1])
    logits = torch.randn(rows, experts, generator=draw) * 2
    correction = torch.randn(experts, generator=draw) * 0.1 if corrected else None
    router = Router(scoring=scoring, renormalize=renormalize, scale=scale, num_groups=groups[0], num_chosen_groups=groups[1])
    ids, weights = run(lambda: native_route.route(logits, correction, router, active), rows)
    wanted_ids, wanted = reference(logits, correction, router, active)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted, atol=1e-7, rtol=3e-6)


def test_the_first_of_equals_wins(run: Run) -> None:
    logits = torch.zeros(2, 40)
    logits[1, [5, 30, 17]] = 1.0
    ids, weights = run(lambda: native_route.route(logits, None, Router(scoring=Scoring.SIGMOID), 4), 2)
    assert ids.tolist() == [[0, 1, 2, 3], [5, 17, 30, 0]]
    torch.testing.assert_close(weights.sum(1), torch.ones(2))


def test_scores_that_vanish_divide_by_nothing(run: Run) -> None:
    logits = torch.full((1, 8), -80.0)
    _, weights = run(lambda: native_route.route(logits, None, Router(scoring=Scoring.SIGMOID), 2), 1)
    assert weights.isfinite().all()


@pytest.mark.parametrize("value", (float("nan"), float("-inf")))
@pytest.mark.usefixtures("instruction_set")
def test_hopeless_logits_still_name_different_experts(value: float) -> None:
    """Whoever looks experts up by these numbers must not be led astray."""
    logits = torch.full((1, 24), value)
    found = native_route.route(logits, None, Router(scoring=Scoring.SOFTMAX_OF_TOP), 5)
    assert found is not None and sorted(found[0][0].tolist()) == [0, 1, 2, 3, 4]
