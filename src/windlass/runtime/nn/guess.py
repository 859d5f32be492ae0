"""Which experts a layer will probably choose, before its attention has been computed.

The residual stream changes little from one layer to the next: what enters the feed-forward of a layer, under the norm and the router of
the next layer with experts, chooses nearly the same experts (measured in docs/reference/offload.md). A guess, never a result. It is made of
operations, so that it is recorded with the step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from windlass.runtime.kernels.ops.norm import norm
from windlass.runtime.kernels.ops.route import route
from windlass.runtime.nn.layer import DecoderLayer
from windlass.runtime.nn.moe import MixtureOfExperts
from windlass.runtime.nn.norm import NormLayer


def next_experts(layer: DecoderLayer, following: DecoderLayer) -> Callable[[Tensor], Tensor] | None:
    """The normed input of one layer's experts to the ids of experts of another. None: their norms do not allow it."""
    moe, norms = following.feed_forward, (_norm_of(layer), _norm_of(following))
    assert isinstance(moe, MixtureOfExperts)
    if any(one.kind != "rms" for one in norms):
        return None
    weight, eps = _renorming(*norms), norms[1].eps

    def guess(x: Tensor) -> Tensor:
        logits = moe.router(norm(x, weight, None, eps, "rms"))
        return route(logits, moe.correction, moe.moe.router, moe.moe.num_active, moe.first)[0]

    return guess


def _norm_of(layer: DecoderLayer) -> NormLayer:
    return layer.ffn_norm if hasattr(layer, "ffn_norm") else layer.mixer_norm


def _renorming(before: NormLayer, after: NormLayer) -> Tensor:
    """The weight of a norm over what another norm gave: it undoes that one's weight. Rows that were normed have a root mean square of one, and with
    the weight applied about that of the weight."""
    old, new = before.weight.detach().float(), after.weight.detach().float()
    scale = torch.where(old == 0, 0.0, new / old)
    return (scale * old.square().mean().sqrt()).to(after.weight.dtype)
