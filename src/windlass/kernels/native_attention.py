"""Attention over the paged cache in C++ (native/attention.cpp).

A query's result does not depend on what else is in the batch, on how its prompt was cut, nor on the number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.kernels import program
from windlass.kernels.native_types import STORED, is_index, is_plain
from windlass.kernels.step import Cache, Step

ALL = 2**31 - 1
"""A window that no sequence is longer than."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Step,
    cache: Cache | None,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor | None:
    """None without a cache: whoever has none trains, or compares."""
    if cache is None or not is_plain(q, sinks, slopes) or not is_index(step.starts, step.lengths, step.counts):
        return None
    if not _readable(cache) or step.blocks.dtype != torch.int32 or step.blocks.stride(-1) != 1:
        return None
    rows, heads, dim = q.shape
    latent = cache.values is None
    values, value_dim = (cache.keys, cache.latent_values) if cache.values is None else (cache.values, cache.values.shape[-1])
    result = program.empty((rows, heads * value_dim))
    tensors = [result, q, cache.keys, values, step.starts, step.lengths, step.blocks, step.counts, sinks, slopes]
    shape = [heads, cache.keys.shape[1], dim, value_dim, q.stride(0), q.stride(1), step.blocks.stride(0)]
    ints = [*shape, ALL if window is None else window, STORED[cache.keys.dtype], int(latent)]
    program.emit("attention", tensors, ints, [scale], rows=rows)
    return result


def _readable(cache: Cache) -> bool:
    parts = [part for part in (cache.keys, cache.values) if part is not None]
    types = {part.dtype for part in parts}
    return len(types) == 1 and types <= {torch.float32, torch.bfloat16} and all(part.is_contiguous() for part in parts)
