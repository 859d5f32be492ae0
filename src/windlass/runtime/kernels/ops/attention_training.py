"""Attention over whole sequences with gradients, by PyTorch's fused kernels. No cache, no sinks, no slopes.

Rows hold one sequence after another, and each attends to itself only. Sequences of equal length are one batch, which every backend
supports; others go through varlen flash attention on a GPU, and one by one elsewhere.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from windlass.runtime.kernels.arguments import AttentionArgs

HALF = (torch.bfloat16, torch.float16)
MAX_FLASH_DIM = 256


def attention(args: AttentionArgs) -> Tensor | None:
    """As ops.attention without a cache; None where none of PyTorch's kernels applies."""
    (q, k, v), step, scale, window = args[:3], args.step, args.scale, args.window
    lengths = step.lengths if step.host_lengths is None else step.host_lengths
    starts = step.starts if step.host_starts is None else step.host_starts
    if not len(lengths) or not torch.equal(starts.diff(), lengths):
        return None  # some tokens are in a cache
    longest = int(lengths.max())
    if window is not None and window < longest:
        return None
    if bool((lengths == longest).all()):
        return _equal_lengths(q, k, v, len(lengths), scale)
    if _can_flash(q, v):
        return _varlen(q, k, v, step.starts, longest, scale)
    parts = [_equal_lengths(q[first:last], k[first:last], v[first:last], 1, scale) for first, last in pairwise(starts.tolist())]
    return torch.cat(parts)


def _equal_lengths(q: Tensor, k: Tensor, v: Tensor, count: int, scale: float) -> Tensor:
    """[rows, heads, dim] as [sequences, heads, tokens, dim] and back; no copies where the kernel supports strides."""
    queries, keys, values = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    mixed = functional.scaled_dot_product_attention(
        queries, keys.to(q.dtype), values.to(q.dtype), is_causal=True, scale=scale, enable_gqa=grouped
    )
    return mixed.transpose(1, 2).flatten(0, 1).flatten(1)


def _can_flash(q: Tensor, v: Tensor) -> bool:
    return q.is_cuda and q.dtype in HALF and q.shape[-1] == v.shape[-1] <= MAX_FLASH_DIM


def _varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float) -> Tensor:
    """The operator behind torch.nn.attention.varlen, whose Python interface changed from release to release."""
    result = torch.ops.aten._flash_attention_forward(
        q, k, v, starts, starts, longest, longest, 0.0, True, False, scale=scale
    )  # fmt: skip
    return result[0].flatten(1)
