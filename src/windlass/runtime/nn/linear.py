"""A linear layer: plain and trainable, or packed, as its source of weights provides it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from windlass.core.ports import Weights
from windlass.runtime.kernels.ops.linear import linear


def as_parameter(weight: Any) -> Any:
    """Tensors become parameters, trainable if the source says so; packed weights stay as they are."""
    if isinstance(weight, Tensor) and not isinstance(weight, nn.Parameter):
        return nn.Parameter(weight, requires_grad=weight.requires_grad)
    return weight


class Linear(nn.Module):
    """Several names are stacked to one matrix: one product instead of three for Q, K and V.

    `biased` False: another tensor-parallel rank adds the bias.
    """

    def __init__(self, weights: Weights, *names: str, biased: bool = True) -> None:
        super().__init__()
        self.names = names
        self.weight = as_parameter(weights.matrix(*(f"{name}.weight" for name in names)))
        self.bias = as_parameter(weights.vector(*(f"{name}.bias" for name in names))) if biased else None

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return linear(x, self.weight, self.bias, add)
