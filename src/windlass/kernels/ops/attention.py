"""Softmax attention of a batch of sequences, over paged keys and values or over those of the batch itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from windlass.kernels.cpu import attention as native_attention
from windlass.kernels.head_groups import Span
from windlass.kernels.ops import attention_training as attention_learning
from windlass.kernels.precision import widened
from windlass.kernels.program import program
from windlass.kernels.step import Cache, Step
from windlass.kernels.triton import available


@dataclass(frozen=True)
class Weighing:
    """What decides how much a query sees of a key, besides their product."""

    scale: float
    window: int | None
    """A query sees so many tokens, itself included."""
    sinks: Tensor | None
    """[heads]: a logit that takes its share of the softmax and gives nothing."""
    slopes: Tensor | None
    """[heads]: how fast a score falls with distance (ALiBi)."""


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
) -> Tensor:
    """q [rows, heads, dim] -> [rows, heads * value dim]; every `heads / kv heads` query heads share a head of keys and values.

    `spans`: who shares which, where it is not so simple.

    With a cache, keys and values are read from its blocks (k and v are there already); without, they are k and v themselves.
    A query sees no key behind its own position in its own sequence.
    """
    how = {"scale": scale, "window": window, "sinks": sinks, "slopes": slopes}
    made = (
        native_attention.attention(q, k, v, step, cache, **how, spans=spans) if program.usable(q, k, v, sinks, slopes) else None
    )
    if made is None and spans:
        return torch.cat([_of_span(span, q, k, v, step, cache, **how) for span in spans], dim=1)
    # Without a cache (nobody serves so) the kernel was wrong for half precision with a window on a real GPU (docs/cuda-notes.md).
    if made is None and cache is not None and (gpu := available.kernels(q, k, v, sinks, slopes)):
        made = gpu.attention(q, k, v, step, cache, **how)
    if made is None and cache is None and sinks is None and slopes is None:
        made = attention_learning.attention(q, k, v, step, scale=scale, window=window)
    return _reference(q, k, v, step, cache, **how) if made is None else made


def _of_span(
    span: Span, q: Tensor, k: Tensor, v: Tensor, step: Step, cache: Cache | None, *, sinks: Any, slopes: Any, **how: Any
) -> Tensor:
    some, kv = slice(*span.heads), slice(*span.kv_heads)
    seen = None if cache is None else cache.of_heads(kv)
    biases = {"sinks": None if sinks is None else sinks[some], "slopes": None if slopes is None else slopes[some]}
    return attention(q[:, some], k[:, kv], v[:, kv], step, seen, **biases, **how)


def _reference(
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
) -> Tensor:
    weighing = Weighing(scale, window, sinks, slopes)
    lengths = (step.lengths if step.host_lengths is None else step.host_lengths).tolist()
    starts = (step.starts if step.host_starts is None else step.host_starts).tolist()
    mixed: list[Tensor] = []
    for sequence, (first, last) in enumerate(pairwise(starts)):
        positions = step.positions[first:last]
        if cache is None:
            keys, values, seen = k[first:last], v[first:last], positions
        else:
            keys, values = cache.gather(step.blocks[sequence], lengths[sequence])
            seen = torch.arange(lengths[sequence], device=q.device)
        mixed.append(_attend(q[first:last], keys, values, positions[:, None] - seen[None], weighing))
    return torch.cat(mixed).to(q.dtype)


def _attend(q: Tensor, keys: Tensor, values: Tensor, distances: Tensor, weighing: Weighing) -> Tensor:
    """One sequence: q [queries, heads, dim], keys [tokens, kv heads, dim], distances [queries, tokens] from key to query."""
    q = widened(q)
    num_kv_heads = keys.shape[1]
    grouped = q.unflatten(1, (num_kv_heads, -1))
    scores = torch.einsum("qkgd,tkd->kgqt", grouped, keys.to(q.dtype)).flatten(0, 1) * weighing.scale
    if weighing.slopes is not None:
        scores = scores - weighing.slopes[:, None, None] * distances
    unseen = distances < 0
    if weighing.window is not None:
        unseen = unseen | (distances >= weighing.window)
    weights = _softmax(scores.masked_fill(unseen, float("-inf")), weighing.sinks).unflatten(0, (num_kv_heads, -1))
    return torch.einsum("kgqt,tkd->qkgd", weights, values.to(q.dtype)).flatten(1)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return scores.softmax(-1)
    column = sinks[:, None, None].expand(-1, scores.shape[1], 1).to(scores.dtype)
    return torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
