"""A norm with its weight and, where it has one, its bias."""

from __future__ import annotations

from torch import Tensor, nn

from windlass.core import model
from windlass.core.ports import Weights
from windlass.kernels.ops.norm import norm
from windlass.nn.linear import held


class Norm(nn.Module):
    def __init__(self, how: model.Norm, weights: Weights, name: str) -> None:
        super().__init__()
        self.kind, self.eps = how.kind, how.eps
        self.weight = held(weights.vector(f"{name}.weight"))
        self.bias = held(weights.vector(f"{name}.bias")) if how.kind == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.bias, self.eps, self.kind)
