"""Fused head and cross-entropy, computed in chunks of rows, so that the full logits are never materialized.

The gradient of a chunk is computed with its logits in the forward pass, so neither logits nor probabilities are kept and nothing is
recomputed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from windlass.runtime.kernels.packing.matrix import WeightMatrix
from windlass.runtime.kernels.precision import widened
from windlass.runtime.kernels.torch_compile import chain
from windlass.tasks.train.model.packing import IGNORED

SLICE_LOGITS = 2**28
"""Logits per chunk: half a gigabyte in 16 bits, with enough rows for an efficient matmul."""


def head_loss(hidden: Tensor, head: WeightMatrix, targets: Tensor, z: float = 0.0) -> tuple[Tensor, Tensor]:
    """(sum over rows of cross-entropy + z * log(denominator)^2, cross-entropy only, without gradient).

    hidden [rows, width], head [vocabulary, width], targets [rows]; rows whose target is IGNORED are left out.
    """
    matrix = head.to(hidden.dtype) if isinstance(head, Tensor) else head.dense(dtype=hidden.dtype)
    total, entropy = HeadLoss.apply(hidden, matrix, targets, z)
    return total, entropy


class HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, z: float) -> tuple[Tensor, Tensor]:
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        wide = torch.promote_types(hidden.dtype, torch.float32)
        total, entropy = (torch.zeros((), dtype=wide, device=hidden.device) for _ in range(2))
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        of_head = torch.zeros_like(head, dtype=wide) if needs_head else None
        rows = max(1, SLICE_LOGITS // head.shape[0])
        for first in range(0, hidden.shape[0], rows):
            some = slice(first, first + rows)
            objective, chunk_entropy, gradient = _slice(hidden[some] @ head.t(), targets[some], z)
            total, entropy = total + objective, entropy + chunk_entropy
            if of_hidden is not None:
                torch.mm(gradient, head, out=of_hidden[some])
            if of_head is not None:
                of_head += gradient.t() @ hidden[some]
        ctx.save_for_backward(of_hidden, None if of_head is None else of_head.to(head.dtype))
        ctx.mark_non_differentiable(entropy)
        return total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        scaled = [None if held is None else held * gradients[0].to(held.dtype) for held in ctx.saved_tensors]
        return scaled[0], scaled[1], None, None


@chain
def _slice(logits: Tensor, targets: Tensor, z: float) -> tuple[Tensor, Tensor, Tensor]:
    """The objective, the cross-entropy, and the objective's gradient with respect to the logits."""
    wide = widened(logits)
    learned = (targets != IGNORED)[:, None].to(wide.dtype)
    chosen = targets.clamp(min=0)[:, None]
    denominator = wide.logsumexp(-1, keepdim=True)
    entropy = ((denominator - wide.gather(1, chosen)) * learned).sum()
    penalty = (denominator.square() * learned).sum()
    places = torch.arange(wide.shape[1], device=wide.device)[None]
    gradient = (wide - denominator).exp() * (1 + 2 * z * denominator) - (places == chosen).to(wide.dtype)
    return entropy + z * penalty, entropy, (gradient * learned).to(logits.dtype)
