"""The dense feed-forward: two matrices with an activation between, or three where the first is gated."""

from __future__ import annotations

from torch import Tensor, nn

from windlass.core import model
from windlass.core.ports import Weights
from windlass.runtime.kernels.ops.activate import activate
from windlass.runtime.nn.linear import Linear
from windlass.runtime.nn.parallel.shard import WHOLE, ModelShard


class FeedForward(nn.Module):
    def __init__(self, activation: model.Activation, gated: bool, weights: Weights, name: str, shard: ModelShard = WHOLE) -> None:
        super().__init__()
        self.activation, self.gated = activation, gated
        self.up = Linear(weights, f"{name}.gate", f"{name}.up") if gated else Linear(weights, f"{name}.up")
        self.down = Linear(weights, f"{name}.down", biased=shard.adds_bias)

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        return self.down(activate(self.up(x), self.activation, self.gated), add)
