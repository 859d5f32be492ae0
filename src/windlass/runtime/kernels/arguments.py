"""The arguments of operations that have many, one tuple each: what callers fill in and every implementation takes.

Tuples, because eager models make one per layer and step: they cost a microsecond.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from windlass.core.model import Activation
from windlass.runtime.kernels.head_groups import Span
from windlass.runtime.kernels.packing.matrix import AnyExperts
from windlass.runtime.kernels.step import KvCache, Step


class AttentionArgs(NamedTuple):
    """Of `ops.attention`. Every `heads / kv heads` query heads share a key and value head.

    With a cache, keys and values are read from its blocks (k and v are stored there already); without, they are k and v themselves.
    A query attends to no key after its own position, and only within its own sequence.
    """

    q: Tensor
    """[rows, heads, dim]"""
    k: Tensor
    """[rows, kv heads, dim]"""
    v: Tensor
    """[rows, kv heads, value dim]"""
    step: Step
    cache: KvCache | None
    scale: float
    window: int | None = None
    """Sliding window: a query attends to this many tokens, itself included."""
    sinks: Tensor | None = None
    """[heads]: a logit that takes part in the softmax and has no value."""
    slopes: Tensor | None = None
    """[heads]: ALiBi slopes."""
    spans: Sequence[Span] = ()
    """Which query heads share which kv heads, where groups are not of equal size."""

    def of_span(self, span: Span) -> AttentionArgs:
        """The arguments of some of the heads."""
        heads, kv_heads = slice(*span.heads), slice(*span.kv_heads)
        return self._replace(
            q=self.q[:, heads],
            k=self.k[:, kv_heads],
            v=self.v[:, kv_heads],
            cache=None if self.cache is None else self.cache.of_heads(kv_heads),
            sinks=None if self.sinks is None else self.sinks[heads],
            slopes=None if self.slopes is None else self.slopes[heads],
            spans=(),
        )


class QkvArgs(NamedTuple):
    """Of `ops.qkv.split_qkv`."""

    qkv: Tensor
    """[rows, (heads + 2 kv heads) * head_dim]; may be overwritten"""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norms: tuple[Tensor, Tensor] | None
    """Weights of an RMS norm over each head of q and of k."""
    eps: float
    table: Tensor | None
    """See rotary_table: the first dimensions of q and k are rotated by the angles of their row's position."""
    interleaved: bool
    """Whether rotated pairs are neighbours."""
    positions: Tensor
    cache: KvCache | None = None
    """k and v are written to its `slots`."""
    slots: Tensor | None = None


class LatentArgs(NamedTuple):
    """Of `ops.latent.join_latent`. The last `rope` elements of each head of q and of kv are rotated; the rest of kv, the latent, gets an RMS
    norm. `rope` is as wide as the table has angles for."""

    absorbed: Tensor
    """[rows, heads, latent]: the queries, projected to the latent"""
    q: Tensor
    """[rows, heads, any + rope]"""
    kv: Tensor
    """[rows, latent + rope]"""
    norm: Tensor
    eps: float
    table: Tensor
    interleaved: bool
    positions: Tensor
    cache: KvCache | None = None
    """Keys are written to its `slots`."""
    slots: Tensor | None = None


class ExpertsArgs(NamedTuple):
    """Of `ops.experts`."""

    x: Tensor
    """[rows, hidden]"""
    ids: Tensor
    """[rows, active], see `route`; ids of experts that are not on this rank add nothing"""
    weights: Tensor
    """[rows, active]"""
    gate_up: AnyExperts
    """[experts, 2 * width, hidden], gate first"""
    down: AnyExperts
    """[experts, hidden, width]"""
    activation: Activation
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    clamp: float | None = None
    add: Tensor | None = None
    """[rows, hidden]: added to the result."""
