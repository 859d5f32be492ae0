"""Softmax attention of a batch of sequences, over the paged KV cache or over the keys and values of the batch itself."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from windlass.runtime.kernels.arguments import AttentionArgs
from windlass.runtime.kernels.cpu import attention as native_attention
from windlass.runtime.kernels.ops import attention_training
from windlass.runtime.kernels.precision import widened
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.triton import available


def attention(args: AttentionArgs) -> Tensor:
    """[rows, heads * value dim]"""
    tensors = args.q, args.k, args.v, args.sinks, args.slopes
    result = native_attention.attention(args) if program.usable(*tensors) else None
    if result is None and args.spans:
        return torch.cat([attention(args.of_span(span)) for span in args.spans], dim=1)
    # Without a cache (no server does that) the kernel was wrong for half precision with a window on a real GPU (docs/reference/cuda-notes.md).
    if result is None and args.cache is not None and (gpu := available.kernels(*tensors)):
        result = gpu.attention(args)
    if result is None and args.cache is None and args.sinks is None and args.slopes is None:
        result = attention_training.attention(args)
    return reference(args) if result is None else result


def reference(args: AttentionArgs) -> Tensor:
    step, cache = args.step, args.cache
    lengths = (step.lengths if step.host_lengths is None else step.host_lengths).tolist()
    starts = (step.starts if step.host_starts is None else step.host_starts).tolist()
    results: list[Tensor] = []
    for sequence, (first, last) in enumerate(pairwise(starts)):
        positions = step.positions[first:last]
        if cache is None:
            keys, values, key_positions = args.k[first:last], args.v[first:last], positions
        else:
            keys, values = cache.gather(step.blocks[sequence], lengths[sequence])
            key_positions = torch.arange(lengths[sequence], device=args.q.device)
        distances = positions[:, None] - key_positions[None]
        results.append(_attend(args.q[first:last], keys, values, distances, args))
    return torch.cat(results).to(args.q.dtype)


def _attend(q: Tensor, keys: Tensor, values: Tensor, distances: Tensor, args: AttentionArgs) -> Tensor:
    """One sequence: q [queries, heads, dim], keys [tokens, kv heads, dim], distances [queries, tokens] from key to query."""
    q = widened(q)
    num_kv_heads = keys.shape[1]
    grouped = q.unflatten(1, (num_kv_heads, -1))
    scores = torch.einsum("qkgd,tkd->kgqt", grouped, keys.to(q.dtype)).flatten(0, 1) * args.scale
    if args.slopes is not None:
        scores = scores - args.slopes[:, None, None] * distances
    masked = distances < 0
    if args.window is not None:
        masked = masked | (distances >= args.window)
    weights = _softmax(scores.masked_fill(masked, float("-inf")), args.sinks).unflatten(0, (num_kv_heads, -1))
    return torch.einsum("kgqt,tkd->qkgd", weights, values.to(q.dtype)).flatten(1)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return scores.softmax(-1)
    column = sinks[:, None, None].expand(-1, scores.shape[1], 1).to(scores.dtype)
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
