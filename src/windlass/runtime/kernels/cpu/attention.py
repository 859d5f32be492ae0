"""Attention over the paged cache in C++ (native/attention/attention.cpp).

A query's result does not depend on the rest of the batch, the chunking of its prompt, or the number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.runtime.kernels.arguments import AttentionArgs
from windlass.runtime.kernels.cpu.types import CACHED, is_index, is_plain
from windlass.runtime.kernels.head_groups import Span
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.step import KvCache

ALL = 2**31 - 1
"""No sliding window."""


def attention(args: AttentionArgs) -> Tensor | None:
    """None without a cache: that is training, or a reference run."""
    q, step, cache, sinks, slopes = args.q, args.step, args.cache, args.sinks, args.slopes
    if cache is None or not is_plain(q, sinks, slopes) or not is_index(step.starts, step.lengths, step.counts):
        return None
    if not _readable(cache) or step.blocks.dtype != torch.int32 or step.blocks.stride(-1) != 1:
        return None
    rows, heads, dim = q.shape
    latent = cache.values is None
    values, value_dim = (cache.keys, cache.latent_values) if cache.values is None else (cache.values, cache.values.shape[-1])
    result = program.empty((rows, heads * value_dim))
    cache_heads = cache.keys.shape[1]
    by_head = result.view(rows, heads, value_dim)
    for span in args.spans or (Span(0, heads, 0, cache_heads),):
        some, kv = slice(*span.heads), slice(*span.kv_heads)
        biases = [None if bias is None else bias[some] for bias in (sinks, slopes)]
        layout = [step.starts, step.lengths, step.blocks, step.counts]
        scales = None if cache.scales is None else cache.scales[:, kv]
        tensors = [by_head[:, some], q[:, some], cache.keys[:, kv], values[:, kv], *layout, *biases, scales]
        shape = [span.num_heads, span.num_kv_heads, dim, value_dim, q.stride(0), q.stride(1), step.blocks.stride(0)]
        window = ALL if args.window is None else args.window
        ints = [*shape, window, CACHED[cache.keys.dtype], int(latent), heads, cache_heads]
        program.emit("attention", tensors, ints, [args.scale], rows=rows)
    return result


def _readable(cache: KvCache) -> bool:
    types = {part.dtype for part in (cache.keys, cache.values) if part is not None}
    return len(types) == 1 and types <= CACHED.keys() and all(part.is_contiguous() for part in cache.parts)
