"""The choice of experts, against its definition in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.model import Router, Scoring
from windlass.runtime.kernels.ops.route import reference, route

pytestmark = pytest.mark.cpu

routers = st.builds(
    Router,
    scoring=st.sampled_from(Scoring),
    renormalize=st.booleans(),
    scale=st.sampled_from([1.0, 2.5]),
    num_groups=st.sampled_from([1, 2, 4]),
    num_chosen_groups=st.just(1),
)


def defined(logits: list[float], correction: list[float], router: Router, num_active: int) -> dict[int, float]:
    """Expert -> weight, of one row."""
    total = sum(math.exp(logit) for logit in logits)
    scores = {
        Scoring.SIGMOID: [1 / (1 + math.exp(-logit)) for logit in logits],
        Scoring.SOFTMAX: [math.exp(logit) / total for logit in logits],
        Scoring.SOFTMAX_OF_TOP: logits,
    }[router.scoring]
    wanted = [score + extra for score, extra in zip(scores, correction, strict=True)]
    size = len(logits) // router.num_groups
    groups = [range(first, first + size) for first in range(0, len(logits), size)]
    groups.sort(key=lambda group: -sum(sorted((wanted[expert] for expert in group), reverse=True)[:2]))
    allowed = [expert for group in groups[: router.num_chosen_groups] for expert in group]
    chosen = sorted(allowed, key=lambda expert: -wanted[expert])[:num_active]
    weights = [scores[expert] for expert in chosen]
    if router.scoring is Scoring.SOFTMAX_OF_TOP:
        weights = [math.exp(weight) / sum(math.exp(other) for other in weights) for weight in weights]
    elif router.renormalize:
        weights = [weight / sum(weights) for weight in weights]
    return {expert: weight * router.scale for expert, weight in zip(chosen, weights, strict=True)}


@given(router=routers, rows=st.integers(1, 4), active=st.integers(1, 2), corrected=st.booleans(), seed=st.integers(0, 999))
def test_definition(router: Router, rows: int, active: int, corrected: bool, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 8, generator=draw) * 2
    correction = torch.randn(8, generator=draw) * 0.5 if corrected else None
    ids, weights = reference(logits, correction, router, active)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    for row in range(rows):
        expected = defined(logits[row].tolist(), [0.0] * 8 if correction is None else correction.tolist(), router, active)
        found = dict(zip(ids[row].tolist(), weights[row].tolist(), strict=True))
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_two_of_four_groups() -> None:
    """Groups of two; the best expert of all stands in a group whose other is bad, and loses with it."""
    logits = torch.tensor([[2.0, -9.0, 1.0, 1.0, 0.9, 0.9, -9.0, -9.0]])
    router = Router(scoring=Scoring.SIGMOID, num_groups=4, num_chosen_groups=2)
    ids, _ = reference(logits, None, router, 3)
    assert set(ids[0].tolist()) <= {2, 3, 4, 5}


def test_the_correction_chooses_and_does_not_weigh() -> None:
    logits, correction = torch.tensor([[1.0, 0.0, -1.0]]), torch.tensor([0.0, 0.0, 5.0])
    ids, weights = route(logits, correction, Router(scoring=Scoring.SIGMOID, renormalize=False), 1)
    assert ids.tolist() == [[2]]
    torch.testing.assert_close(weights, torch.tensor([[-1.0]]).sigmoid())


def test_scores_that_all_vanish() -> None:
    _, weights = reference(torch.full((1, 4), -200.0), None, Router(scoring=Scoring.SIGMOID), 2)
    assert torch.isfinite(weights).all()


def test_weights_carry_gradients() -> None:
    logits = torch.randn(3, 8, requires_grad=True)
    route(logits, None, Router(scoring=Scoring.SOFTMAX), 2)[1].square().sum().backward()
    assert logits.grad is not None
    assert logits.grad.abs().max() > 0


def test_ids_count_from_a_rank_s_own_first_expert() -> None:
    """Weights are what they are for whoever holds the expert."""
    logits = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    for values in (logits, logits.double()):  # compiled, and not
        ids, weights = route(values, None, Router(scoring=Scoring.SOFTMAX), 3)
        own, same = route(values, None, Router(scoring=Scoring.SOFTMAX), 3, 5)
        assert torch.equal(own, ids - 5)
        assert torch.equal(same, weights)
