"""The routed feed-forward: a few experts of many for each token and, in some models, one that every token passes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from windlass.core import model
from windlass.core.ports import Weights
from windlass.kernels.experts import experts
from windlass.kernels.route import route
from windlass.nn.feed_forward import FeedForward
from windlass.nn.linear import Linear, held
from windlass.nn.shard import WHOLE, Shard


class MixtureOfExperts(nn.Module):
    def __init__(self, moe: model.MoE, weights: Weights, layer: int, name: str, shard: Shard = WHOLE) -> None:
        super().__init__()
        self.moe, self.first = moe, shard.experts(moe.num_experts)[0]
        self.router = Linear(weights, f"{name}.router")
        if torch.finfo(weights.dtype).bits < 32:
            # Scores that are close decide between experts; half precision would choose others.
            self.router.float()
        self.correction = held(weights.vector(f"{name}.router.correction")) if moe.router.correction_bias else None
        self.gate_up, self.down = held(weights.experts(layer, "gate", "up")), held(weights.experts(layer, "down"))
        self.gate_up_bias = held(weights.expert_vectors(layer, "gate", "up")) if moe.bias else None
        self.down_bias = held(weights.expert_vectors(layer, "down")) if moe.bias and shard.adds_to_experts else None
        has_shared = moe.shared_intermediate_size > 0
        self.shared = FeedForward(moe.activation, True, weights, f"{name}.shared", shard) if has_shared else None

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        ids, shares = route(self.router(x), self.correction, self.moe.router, self.moe.num_active, self.first)
        if self.shared is not None:
            add = self.shared(x, add)
        return experts(
            x,
            ids,
            shares,
            self.gate_up,
            self.down,
            self.moe.activation,
            gate_up_bias=self.gate_up_bias,
            down_bias=self.down_bias,
            clamp=self.moe.clamp,
            add=add,
        )
