"""A norm layer: RMS norm, or layer norm with its bias."""

from __future__ import annotations

from torch import Tensor, nn

from windlass.core import model
from windlass.core.ports import Weights
from windlass.runtime.kernels.ops.norm import norm
from windlass.runtime.nn.linear import as_parameter


class NormLayer(nn.Module):
    def __init__(self, norm_spec: model.Norm, weights: Weights, name: str) -> None:
        super().__init__()
        self.kind, self.eps = norm_spec.kind, norm_spec.eps
        self.weight = as_parameter(weights.vector(f"{name}.weight"))
        self.bias = as_parameter(weights.vector(f"{name}.bias")) if norm_spec.kind == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.bias, self.eps, self.kind)
