"""The mixture of experts: top-k routed experts and, in some models, a shared expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from windlass.core import model
from windlass.core.ports import Weights
from windlass.runtime.kernels.arguments import ExpertsArgs
from windlass.runtime.kernels.ops.experts import experts
from windlass.runtime.kernels.ops.route import route
from windlass.runtime.nn.feed_forward import FeedForward
from windlass.runtime.nn.linear import Linear, as_parameter
from windlass.runtime.nn.parallel.shard import WHOLE, ModelShard

RoutingHook = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(logits, ids, weights) to the weights: lets a trainer count experts and attach auxiliary losses."""


class Experts(nn.Module):
    """The routed experts of this rank."""

    def __init__(self, moe: model.MoE, weights: Weights, layer: int, shard: ModelShard = WHOLE) -> None:
        super().__init__()
        self.moe = moe
        self.gate_up, self.down = as_parameter(weights.experts(layer, "gate", "up")), as_parameter(weights.experts(layer, "down"))
        self.gate_up_bias = as_parameter(weights.expert_vectors(layer, "gate", "up")) if moe.bias else None
        self.down_bias = as_parameter(weights.expert_vectors(layer, "down")) if moe.bias and shard.adds_expert_bias else None

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor, add: Tensor | None = None) -> Tensor:
        return experts(
            ExpertsArgs(
                x,
                ids,
                weights,
                self.gate_up,
                self.down,
                self.moe.activation,
                gate_up_bias=self.gate_up_bias,
                down_bias=self.down_bias,
                clamp=self.moe.clamp,
                add=add,
            )
        )


class MixtureOfExperts(nn.Module):
    correction: Tensor | None

    def __init__(self, moe: model.MoE, weights: Weights, layer: int, name: str, shard: ModelShard = WHOLE) -> None:
        super().__init__()
        self.moe, self.first = moe, shard.experts(moe.num_experts)[0]
        self.router = Linear(weights, f"{name}.router")
        if torch.finfo(weights.dtype).bits < 32:
            # Close scores decide between experts; half precision would choose others.
            self.router.float()
        # Updated from expert counts, not by gradients.
        self.register_buffer("correction", _correction(weights, name) if moe.router.correction_bias else None)
        self.experts: nn.Module = Experts(moe, weights, layer, shard)
        has_shared = moe.shared_intermediate_size > 0
        self.shared = FeedForward(moe.activation, True, weights, f"{name}.shared", shard) if has_shared else None
        self.routing_hook: RoutingHook | None = None

    def forward(self, x: Tensor, add: Tensor | None = None) -> Tensor:
        logits = self.router(x)
        ids, weights = route(logits, self.correction, self.moe.router, self.moe.num_active, self.first)
        if self.routing_hook is not None:
            weights = self.routing_hook(logits, ids, weights)
        if self.shared is not None:
            add = self.shared(x, add)
        return self.experts(x, ids, weights, add)

    # runtime/nn/fused/feed_forward.py replaces these matrices.

    @property
    def gate_up(self) -> Any:
        return self.experts.gate_up

    @gate_up.setter
    def gate_up(self, matrix: Any) -> None:
        self.experts.gate_up = matrix

    @property
    def gate_up_bias(self) -> Tensor | None:
        return self.experts.gate_up_bias

    @property
    def down(self) -> Any:
        return self.experts.down

    @down.setter
    def down(self, matrix: Any) -> None:
        self.experts.down = matrix


def _correction(weights: Weights, name: str) -> Tensor:
    return weights.vector(f"{name}.router.correction").detach()
