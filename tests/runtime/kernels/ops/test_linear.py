"""Products in plain PyTorch: in which type, with bias and residual, and of packed weights as of the numbers they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from windlass.runtime.kernels.ops.linear import embed, embed_reference, linear, reference
from windlass.runtime.kernels.packing.panels import Panels

pytestmark = pytest.mark.cpu


def packed(num_out: int = 20, num_in: int = 64) -> Panels:
    return Panels.random("int4", num_out, num_in, 32, deviation=0.5)


def test_bias_and_residual() -> None:
    x, weight, bias, residual = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5), torch.randn(3, 5)
    torch.testing.assert_close(reference(x, weight), x @ weight.T)
    torch.testing.assert_close(reference(x, weight, bias, residual), x @ weight.T + bias + residual)


@pytest.mark.parametrize(
    ("activations", "weights", "results"),
    [
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float32, torch.float16, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float64, torch.float32, torch.float64),
    ],
)
def test_the_wider_type_computes(activations: torch.dtype, weights: torch.dtype, results: torch.dtype) -> None:
    x, weight, bias = torch.randn(3, 8).to(activations), torch.randn(5, 8).to(weights), torch.randn(5)
    found = reference(x, weight, bias)
    assert found.dtype == results
    loose = 2e-2 if results == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T + bias, atol=loose, rtol=loose)


def test_packed_weights_are_their_numbers() -> None:
    x, weight, bias = torch.randn(3, 64), packed(), torch.randn(20)
    torch.testing.assert_close(reference(x, weight, bias), x @ weight.dense().T + bias)
    assert reference(x.bfloat16(), weight).dtype == torch.bfloat16


@pytest.mark.parametrize("native", [True, False])
def test_rows_of_a_table(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    if not native:
        monkeypatch.setenv("WINDLASS_NO_NATIVE", "1")
    tokens, table, panels = torch.tensor([3, 0, 19, 3], dtype=torch.int32), torch.randn(20, 64), packed()
    assert torch.equal(embed(tokens, table), table[tokens.long()])
    assert torch.equal(embed(tokens, table.bfloat16()), table.bfloat16()[tokens.long()].float())
    torch.testing.assert_close(embed(tokens, panels), panels.dense()[tokens.long()])
    assert embed(tokens, table.bfloat16(), torch.bfloat16).dtype == torch.bfloat16
    assert embed_reference(tokens, panels, torch.bfloat16).dtype == torch.bfloat16


def test_gradients_flow_to_all_that_learn() -> None:
    parts: list[Tensor] = [torch.randn(3, 8), torch.randn(5, 8), torch.randn(5), torch.randn(3, 5)]
    for part in parts:
        part.requires_grad_()
    linear(*parts).sum().backward()
    assert all(part.grad is not None for part in parts)
    table = torch.randn(4, 8).requires_grad_()
    embed(torch.tensor([1, 1]), table).sum().backward()
    assert table.grad is not None
    assert torch.equal(table.grad.sum(1), torch.tensor([0.0, 16.0, 0.0, 0.0]))
