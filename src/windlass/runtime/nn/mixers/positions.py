"""Position information of mixers: a rotary table, shared by all layers, or ALiBi slopes per head."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from windlass.core import model
from windlass.core.ports import Weights
from windlass.runtime.kernels.ops.rotary import rotary_table


class Rotary(nn.Module):
    table: Tensor

    def __init__(self, rope: model.Rope, context_tokens: int, weights: Weights) -> None:
        super().__init__()
        self.interleaved = rope.interleaved
        self.register_buffer("table", rotary_table(rope, context_tokens).to(weights.device), persistent=False)


def alibi_slopes(alibi: model.Alibi, num_heads: int, scale: float) -> Tensor:
    """2^(-8 / n), its square, its cube...; heads beyond a power of two take every other one of the next (arXiv 2108.12409).

    `scale` multiplies the scores; a bias that is added before scaling is multiplied too.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * head / power) for head in range(1, power + 1)]
    slopes += [2 ** (-4 * head / power) for head in range(1, 2 * (num_heads - power), 2)]
    return torch.tensor(slopes, dtype=torch.float32) * (scale if alibi.before_scaling else 1.0)
