"""Attention over the paged cache in C++ (native/attention/attention.cpp).

A query's result does not depend on what else is in the batch, on how its prompt was cut, nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from windlass.kernels.cpu.types import STORED, is_index, is_plain
from windlass.kernels.head_groups import Span
from windlass.kernels.program import program
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
    spans: Sequence[Span] = (),
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
    cache_heads = cache.keys.shape[1]
    of_heads = result.view(rows, heads, value_dim)
    for span in spans or (Span(0, heads, 0, cache_heads),):
        some, kv = slice(*span.heads), slice(*span.kv_heads)
        biases = [None if bias is None else bias[some] for bias in (sinks, slopes)]
        where = [step.starts, step.lengths, step.blocks, step.counts]
        tensors = [of_heads[:, some], q[:, some], cache.keys[:, kv], values[:, kv], *where, *biases]
        shape = [span.num_heads, span.num_kv_heads, dim, value_dim, q.stride(0), q.stride(1), step.blocks.stride(0)]
        ints = [*shape, ALL if window is None else window, STORED[cache.keys.dtype], int(latent), heads, cache_heads]
        program.emit("attention", tensors, ints, [scale], rows=rows)
    return result


def _readable(cache: Cache) -> bool:
    parts = [part for part in (cache.keys, cache.values) if part is not None]
    types = {part.dtype for part in parts}
    return len(types) == 1 and types <= {torch.float32, torch.bfloat16} and all(part.is_contiguous() for part in parts)
