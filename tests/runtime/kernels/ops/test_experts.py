"""The routed feed-forward in plain PyTorch: row by row and expert by expert it is the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from windlass.core.model import Activation
from windlass.runtime.kernels.arguments import ExpertsArgs
from windlass.runtime.kernels.ops.activate import reference as activate
from windlass.runtime.kernels.ops.experts import experts, reference
from windlass.runtime.kernels.packing import quantize
from windlass.runtime.kernels.packing.panels import Panels

pytestmark = pytest.mark.cpu


@given(
    rows=st.integers(1, 6),
    active=st.integers(1, 3),
    biased=st.booleans(),
    activation=st.sampled_from([Activation.SILU, Activation.CLAMPED_SWIGLU]),
    seed=st.integers(0, 999),
)
def test_one_by_one(rows: int, active: int, biased: bool, activation: Activation, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    x, residual, weights = random(rows, 6), random(rows, 6), random(rows, active)
    ids = torch.stack([torch.randperm(5, generator=draw)[:active] for _ in range(rows)]).int()
    gate_up, down = random(5, 8, 6), random(5, 6, 4)
    gate_up_bias, down_bias = (random(5, 8), random(5, 6)) if biased else (None, None)
    clamp = 0.7 if activation is Activation.CLAMPED_SWIGLU else None
    found = reference(
        ExpertsArgs(
            x, ids, weights, gate_up, down, activation, gate_up_bias=gate_up_bias, down_bias=down_bias, clamp=clamp, add=residual
        )
    )
    expected = residual.clone()
    for row in range(rows):
        for slot, expert in enumerate(ids[row].tolist()):
            inner = gate_up[expert] @ x[row] + (gate_up_bias[expert] if gate_up_bias is not None else 0)
            outer = down[expert] @ activate(inner, activation, True, clamp) + (down_bias[expert] if down_bias is not None else 0)
            expected[row] += weights[row, slot] * outer
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_packed_experts_are_their_numbers() -> None:
    gate_up = Panels.random("int4", 128, 32, 32, num_experts=3, deviation=0.3)
    down = Panels.random("int4", 32, 64, 32, num_experts=3, deviation=0.3, seed=1)
    x, ids, weights = torch.randn(4, 32), torch.tensor([[0], [2], [2], [0]], dtype=torch.int32), torch.rand(4, 1)
    dense = [torch.stack([packed.dense(expert) for expert in range(3)]) for packed in (gate_up, down)]
    expected = reference(ExpertsArgs(x, ids, weights, *dense, Activation.SILU))
    torch.testing.assert_close(reference(ExpertsArgs(x, ids, weights, gate_up, down, Activation.SILU)), expected)


def test_only_the_chosen_learn() -> None:
    gate_up, down = torch.randn(3, 8, 6, requires_grad=True), torch.randn(3, 6, 4, requires_grad=True)
    ids = torch.tensor([[0, 2]], dtype=torch.int32)
    experts(ExpertsArgs(torch.randn(1, 6), ids, torch.ones(1, 2), gate_up, down, Activation.SILU)).sum().backward()
    for part in (gate_up, down):
        assert part.grad is not None
        assert [bool(expert.any()) for expert in part.grad] == [True, False, True]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_ranks_with_some_experts_each_say_together_what_one_with_all_says(compiled: bool, packed: bool) -> None:
    """Ids count from a rank's own first expert; what lies outside is others', and a rank may have nothing to say at all."""
    draw = torch.Generator().manual_seed(5)
    x, weights = torch.randn(7, 32, generator=draw), torch.rand(7, 2, generator=draw)
    ids = torch.stack([torch.randperm(5, generator=draw)[:2] for _ in range(7)]).int()
    ids[0] = torch.tensor([3, 4])
    gate_up, down = torch.randn(5, 128, 32, generator=draw) * 0.2, torch.randn(5, 32, 64, generator=draw) * 0.2
    biases = torch.randn(5, 32, generator=draw)
    if packed:  # numbers that codes of eight bits have room for
        gate_up, down = (gate_up * 16).round().clamp(-127, 127) / 16, (down * 16).round().clamp(-127, 127) / 16

    def said(first: int, last: int, rows: int = 7) -> Tensor:
        matrices = [stacked(part[first:last]) if packed else part[first:last].contiguous() for part in (gate_up, down)]
        given = (x[:rows], ids[:rows] - first, weights[:rows], *matrices, Activation.SILU)
        return (experts if compiled else reference)(ExpertsArgs(*given, down_bias=biases[first:last].contiguous()))

    torch.testing.assert_close(said(0, 2) + said(2, 5), said(0, 5), atol=0.05 if packed and compiled else 1e-5, rtol=0.01)
    assert not said(0, 2, rows=1).any()


def stacked(matrices: Tensor) -> Panels:
    made = Panels.allocate("int8", *matrices.shape[1:], 32, num_experts=len(matrices))
    for expert, matrix in enumerate(matrices):
        found = quantize.int8(matrix, 32)
        made.put(0, found.codes, found.scale, expert=expert)
    return made
