"""Activations, against their formulas."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from windlass.core.model import Activation
from windlass.runtime.kernels.ops.activate import activate, reference

pytestmark = pytest.mark.cpu

FORMULAS: dict[Activation, Callable[[float], float]] = {
    Activation.SILU: lambda x: x / (1 + math.exp(-x)),
    Activation.GELU: lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    Activation.GELU_TANH: lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    Activation.CLAMPED_SWIGLU: lambda x: x / (1 + math.exp(-1.702 * x)),
}


@pytest.mark.parametrize("activation", Activation)
def test_formulas(activation: Activation) -> None:
    x = torch.linspace(-6, 6, 49, dtype=torch.float64).view(7, 7)
    expected = torch.tensor([[FORMULAS[activation](value) for value in row] for row in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(reference(x, activation, False), expected)


@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU, Activation.GELU_TANH])
def test_the_first_half_is_the_gate(activation: Activation) -> None:
    gate, up = torch.randn(2, 3, 5)
    expected = reference(gate, activation, False) * up
    torch.testing.assert_close(activate(torch.cat((gate, up), -1), activation, True), expected)


def test_clamped() -> None:
    """The gate is limited above, the other half on both sides, and then moved by one."""
    gate, up = torch.tensor([[9.0, -9.0, 1.0]]), torch.tensor([[9.0, -9.0, 0.5]])
    found = reference(torch.cat((gate, up), -1), Activation.CLAMPED_SWIGLU, True, 7.0)
    formula = FORMULAS[Activation.CLAMPED_SWIGLU]
    torch.testing.assert_close(found, torch.tensor([[formula(7) * 8, formula(-9) * -6, formula(1) * 1.5]]))
