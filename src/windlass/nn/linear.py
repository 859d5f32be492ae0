"""A matrix with its bias, as it comes from the source of weights: plain and trainable, or packed."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from windlass.core.ports import Weights
from windlass.kernels.ops.linear import linear


def held(found: Any) -> Any:
    """As a module holds it: tensors become parameters, which learn where the source says so; panels stay what they are."""
    if isinstance(found, Tensor) and not isinstance(found, nn.Parameter):
        return nn.Parameter(found, requires_grad=found.requires_grad)
    return found


class Linear(nn.Module):
    """Several names are one matrix, their outputs one after another: one product instead of three for Q, K and V.

    `biased` False: another rank adds the bias, to the sum of which this product is a part.
    """

    def __init__(self, weights: Weights, *names: str, biased: bool = True) -> None:
        super().__init__()
        self.weight = held(weights.matrix(*(f"{name}.weight" for name in names)))
        self.bias = held(weights.vector(*(f"{name}.bias" for name in names))) if biased else None

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return linear(x, self.weight, self.bias, add)
