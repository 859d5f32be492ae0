"""Which experts a layer will probably choose, before its attention has been computed.

The residual stream changes little from one layer to the next: what enters the feed-forward of a layer, under the norm and the router of
the next layer with experts, chooses nearly the same experts (measured in docs/guides/offload.md). A guess, never a result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from windlass.kernels.ops.route import route
from windlass.nn.layer import DecoderLayer
from windlass.nn.moe import MixtureOfExperts
from windlass.nn.norm import NormLayer

Guess = Callable[[Tensor], Tensor]


def next_experts(layer: DecoderLayer, following: DecoderLayer) -> Guess:
    """The normed input of one layer's experts to the ids of experts of another."""
    moe, (scale, shift) = following.feed_forward, _renormed(_norm_of(layer), _norm_of(following))
    assert isinstance(moe, MixtureOfExperts)

    def guess(x: Tensor) -> Tensor:
        with torch.no_grad():
            logits = moe.router((x * scale + shift).to(x.dtype))
            return route(logits, moe.correction, moe.moe.router, moe.moe.num_active, moe.first)[0]

    return guess


def _norm_of(layer: DecoderLayer) -> NormLayer:
    return layer.ffn_norm if hasattr(layer, "ffn_norm") else layer.mixer_norm


def _renormed(before: NormLayer, after: NormLayer) -> tuple[Tensor, Tensor]:
    """What undoes weight and bias of one norm and applies those of another."""
    weights = [norm.weight.detach().float() for norm in (before, after)]
    biases = [torch.zeros(()) if norm.bias is None else norm.bias.detach().float() for norm in (before, after)]
    scale = torch.where(weights[0] == 0, 0.0, weights[1] / weights[0])
    return scale, biases[1] - biases[0] * scale
