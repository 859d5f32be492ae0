"""Attention over whole sequences with gradients, by PyTorch's own fused kernels. No caches, no sinks, no slopes.

Sequences lie one after another in the rows and see only themselves. Those of one length are one batch, which every backend takes;
others go through flash attention for unlike lengths on a GPU, and one by one elsewhere.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from windlass.kernels.step import Step

HALF = (torch.bfloat16, torch.float16)
MAX_FLASH_DIM = 256


def attention(q: Tensor, k: Tensor, v: Tensor, step: Step, *, scale: float, window: int | None) -> Tensor | None:
    """As kernels.attention without a cache; None where no kernel of PyTorch's does it."""
    lengths = step.lengths if step.host_lengths is None else step.host_lengths
    starts = step.starts if step.host_starts is None else step.host_starts
    if not len(lengths) or not torch.equal(starts.diff(), lengths):
        return None  # something lies in a cache
    longest = int(lengths.max())
    if window is not None and window < longest:
        return None
    if bool((lengths == longest).all()):
        return _together(q, k, v, len(lengths), scale)
    if _can_flash(q, v):
        return _unlike(q, k, v, step.starts, longest, scale)
    parts = [_together(q[first:last], k[first:last], v[first:last], 1, scale) for first, last in pairwise(starts.tolist())]
    return torch.cat(parts)


def _together(q: Tensor, k: Tensor, v: Tensor, count: int, scale: float) -> Tensor:
    """[rows, heads, dim] as [sequences, heads, tokens, dim] and back; nothing is copied where the kernel takes strides."""
    queries, keys, values = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    mixed = functional.scaled_dot_product_attention(
        queries, keys.to(q.dtype), values.to(q.dtype), is_causal=True, scale=scale, enable_gqa=grouped
    )
    return mixed.transpose(1, 2).flatten(0, 1).flatten(1)


def _can_flash(q: Tensor, v: Tensor) -> bool:
    return q.is_cuda and q.dtype in HALF and q.shape[-1] == v.shape[-1] <= MAX_FLASH_DIM


def _unlike(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float) -> Tensor:
    """The operator behind torch.nn.attention.varlen, whose Python face changed from release to release."""
    made = torch.ops.aten._flash_attention_forward(
        q, k, v, starts, starts, longest, longest, 0.0, True, False, scale=scale
    )  # fmt: skip
    return made[0].flatten(1)
