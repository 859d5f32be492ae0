"""One layer of the fused pass (decoder.py), for few, several and many rows, and the residual stream between layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.runtime.kernels.arguments import AttentionArgs
from windlass.runtime.kernels.cuda import attention as heads
from windlass.runtime.kernels.cuda import int8, linear, norm
from windlass.runtime.kernels.cuda.layout import Tiles
from windlass.runtime.kernels.ops.attention import attention
from windlass.runtime.kernels.step import KvCache, Step
from windlass.runtime.nn.fused.feed_forward import DenseFeed, OffloadedFeed, SlicedFeed, dense_feed, routed_feed
from windlass.runtime.nn.fused.prompts import Prompts, attend_whole, padded_rows
from windlass.runtime.nn.layer import DecoderLayer
from windlass.runtime.nn.mixers.attention import AttentionMixer
from windlass.runtime.nn.moe import MixtureOfExperts

MAX_ROWS = 64
"""Beyond, products are compute-bound."""
DENSE_ROWS = 8
"""The same where every weight meets every row: in bf16, reading rows from the second-level cache takes longer than reading weights."""


@dataclass
class ResidualStream:
    """The residual stream, and partial sums that are not added to it yet."""

    h: Tensor
    """fp32 [rows, hidden]"""
    eps: float
    parts: Tensor | None = None
    weights: Tensor | None = None

    def normed(self, weight: Tensor) -> Tensor:
        """bf16 [rows, hidden]: adds all parts, then the norm."""
        x = torch.empty(self.h.shape, dtype=torch.bfloat16, device=self.h.device)
        self._norm(weight, x, None)
        return x

    def rounded(self, weight: Tensor) -> int8.RoundedRows:
        """The same in 8 bits."""
        rows = int8.empty_rows(*self.h.shape, self.h.device)
        self._norm(weight, None, rows)
        return rows

    def normed_and_rounded(self, weight: Tensor) -> tuple[Tensor, int8.RoundedRows]:
        x = torch.empty(self.h.shape, dtype=torch.bfloat16, device=self.h.device)
        rows = int8.empty_rows(*self.h.shape, self.h.device)
        self._norm(weight, x, rows)
        return x, rows

    def settled(self, weight: Tensor) -> Tensor:
        """h with all parts added. `weight`: of any norm of this width."""
        if self.parts is not None:
            self._norm(weight, None, None)
        return self.h

    def _norm(self, weight: Tensor, out: Tensor | None, rounded: int8.RoundedRows | None) -> None:
        norm.add_norm(self.h, weight, out, self.eps, parts=self.parts, weights=self.weights, rounded=rounded)
        self.parts = self.weights = None


class FusedLayer:
    def __init__(self, layer: DecoderLayer, eps: float) -> None:
        assert isinstance(layer.mixer, AttentionMixer)
        self.mixer, self.eps = layer.mixer, eps
        self.norm, self.ffn_norm = layer.mixer_norm.weight, layer.ffn_norm.weight
        self.qkv: Tiles = layer.mixer.qkv.weight
        self.out: Tiles = layer.mixer.o.weight
        feed = layer.feed_forward
        self.feed = routed_feed(feed) if isinstance(feed, MixtureOfExperts) else dense_feed(feed)
        self.in_int8 = all(map(int8.supports, (self.qkv, self.out, self.feed.gate_up, self.feed.down)))
        self.most_streamed = DENSE_ROWS if self.in_int8 and isinstance(self.feed, DenseFeed) else MAX_ROWS
        """Rows of a step up to which weights are streamed."""

    @property
    def kind(self) -> tuple[object, ...]:
        """What is launched depends on it: the feed-forward's type, and the shapes of all matrices."""
        mixer, feed = self.mixer, self.feed
        shapes = [(one.data.shape, one.rows, one.inputs, one.group) for one in (self.qkv, self.out, feed.gate_up, feed.down)]
        norms = mixer.q_norm is not None, mixer.k_norm is not None
        alone = id(self) if isinstance(feed, OffloadedFeed | SlicedFeed) else 0  # these depend on what lies where
        return (type(feed), *shapes, mixer.qkv.bias is not None, norms, alone)

    def takes_few(self, rows: int) -> bool:
        """Whether `few` takes so many."""
        return (
            rows <= linear.FEW_ROWS
            and linear.takes_few(self.qkv, rows)
            and linear.takes_few(self.out, rows, budget=linear.FINAL_BUDGET)
            and self.feed.takes_few(rows)
        )

    def few(self, h: Tensor, cache: KvCache, space: AttentionLaunch) -> None:
        """h fp32 [1 to 4 rows, hidden], in place. A step of decoding sequences."""
        qkv = self._empty_qkv(h.shape[0], space)
        linear.linear_few(h, self.qkv, qkv, bias=self.mixer.qkv.bias, norm=self.norm, eps=self.eps)
        linear.linear_few(self._attended(qkv, cache, space), self.out, h, residual=h)
        self.feed.few(h, self.ffn_norm, self.eps)

    def several(self, stream: ResidualStream, cache: KvCache, space: AttentionLaunch) -> None:
        """2 to 64 rows."""
        x = stream.normed(self.norm)
        rows, few = x.shape[0], x.shape[0] <= 8
        qkv = self._empty_qkv(rows, space)
        product = linear.linear_eight if few and linear.num_slices(self.qkv) == 1 else linear.linear_wide
        product(x, self.qkv, qkv[:rows], bias=self.mixer.qkv.bias)
        stream.parts = linear.linear_parts(self._attended(qkv, cache, space), self.out)
        x = stream.normed(self.ffn_norm)
        stream.parts, stream.weights = self.feed.several(x, stream.h)

    def wide(self, stream: ResidualStream, cache: KvCache, space: AttentionLaunch) -> None:
        """Any number of rows."""
        rows = stream.h.shape[0]
        qkv = self._empty_qkv(rows, space)
        if self.in_int8:
            int8.linear(stream.rounded(self.norm), self.qkv, qkv[:rows], bias=self.mixer.qkv.bias)
            stream.parts = int8.linear_parts(self._attended_rounded(qkv, cache, space), self.out)
            stream.parts, stream.weights = self.feed.wide_int8(*stream.normed_and_rounded(self.ffn_norm))
        else:
            linear.linear_wide(stream.normed(self.norm), self.qkv, qkv[:rows], bias=self.mixer.qkv.bias)
            stream.parts = linear.linear_parts(self._attended(qkv, cache, space), self.out)
            stream.parts, stream.weights = self.feed.wide(stream.normed(self.ffn_norm))

    # --- attention

    def _empty_qkv(self, rows: int, space: AttentionLaunch) -> Tensor:
        """The padding of the last prompt is zero."""
        qkv = torch.empty(rows + space.padding, self.qkv.rows, dtype=torch.bfloat16, device=self.qkv.data.device)
        if space.padding:
            qkv[rows:] = 0
        return qkv

    def _attended(self, qkv: Tensor, cache: KvCache, space: AttentionLaunch) -> Tensor:
        """Decoding sequences come first, then begun prompts, then new ones."""
        rows = qkv.shape[0] - space.padding
        self._normed_heads(qkv[:rows])
        if space.prompts is not None and space.prompts.new == [(0, rows)] and not space.decoding.tokens.shape[0]:
            return attend_whole(*self._rotated(qkv, space.prompts, cache), self.mixer.scale)[:rows]
        out = torch.empty(rows, self.mixer.num_heads * self.mixer.head_dim, dtype=qkv.dtype, device=qkv.device)
        decoding = space.decoding.tokens.shape[0]
        if decoding:
            self._decoded(qkv[:decoding], cache, space, out[:decoding])
        if space.prompts is not None:
            self._prefilled(qkv[decoding:], space.prompts, cache, out[decoding:])
        return out

    def _attended_rounded(self, qkv: Tensor, cache: KvCache, space: AttentionLaunch) -> int8.RoundedRows:
        """The same in 8 bits: where all sequences are decoding, attention rounds its results itself."""
        if space.prompts is not None:
            return int8.quantize_rows(self._attended(qkv, cache, space))
        self._normed_heads(qkv)
        out = int8.empty_rows(qkv.shape[0], self.mixer.num_heads * self.mixer.head_dim, qkv.device)
        self._decoded(qkv, cache, space, out)
        return out

    def _normed_heads(self, qkv: Tensor) -> None:
        if self.mixer.q_norm is not None:
            heads.head_norm(qkv, self.mixer.q_norm, self.mixer.k_norm, self.mixer.num_kv_heads, self.eps)

    def _decoded(self, qkv: Tensor, cache: KvCache, space: AttentionLaunch, out: Tensor | int8.RoundedRows) -> None:
        """One new token per sequence."""
        mixer, rotary, step = self.mixer, self.mixer.rotary, space.decoding
        assert rotary is not None and cache.values is not None
        heads.decode_attention(
            qkv, rotary.table, step.positions, step.slots, step.lengths, step.blocks, cache.keys, cache.values, out, space.attention,
            scale=mixer.scale, splits=space.splits, shape=space.shape, interleaved=rotary.interleaved, scales=cache.scales,
            chained=step.is_chained,
        )  # fmt: skip

    def _prefilled(self, qkv: Tensor, prompts: Prompts, cache: KvCache, out: Tensor) -> None:
        """Several tokens per sequence."""
        q, k, v = self._rotated(qkv, prompts, cache)
        if prompts.begun is not None:
            rows = prompts.begun.tokens.shape[0]
            out[:rows] = self.general_attention((q[:rows], k[:rows], v[:rows]), prompts.begun, cache)
        for first, last in prompts.new:
            padded = slice(first, first + padded_rows(last - first))
            out[first:last] = attend_whole(q[padded], k[padded], v[padded], self.mixer.scale)[: last - first]

    def _rotated(self, qkv: Tensor, prompts: Prompts, cache: KvCache) -> tuple[Tensor, ...]:
        """Queries, keys and values [rows and padding, heads, dim]; keys and values are stored in the cache too."""
        mixer, rotary = self.mixer, self.mixer.rotary
        assert rotary is not None
        heads.rotate_store(
            qkv[: prompts.positions.shape[0]], rotary.table, prompts.positions, prompts.slots, cache.keys, cache.values,
            mixer.num_kv_heads, interleaved=rotary.interleaved, scales=cache.scales,
        )  # fmt: skip
        return self.heads_of(qkv)

    def heads_of(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values [rows, heads, dim]."""
        mixer = self.mixer
        return qkv.view(qkv.shape[0], -1, mixer.head_dim).split((mixer.num_heads, mixer.num_kv_heads, mixer.num_kv_heads), dim=1)

    def general_attention(self, qkv: Sequence[Tensor], step: Step, cache: KvCache) -> Tensor:
        """Over the cache, where the rows' own keys and values are already."""
        return attention(AttentionArgs(*qkv, step, cache, scale=self.mixer.scale))


@dataclass(frozen=True)
class AttentionLaunch:
    """The launch shape of a step's decode attention, and its workspace."""

    attention: heads.AttentionWorkspace
    splits: int
    shape: tuple[int, int]
    decoding: Step
    """Sequences with one row each: they come first."""
    prompts: Prompts | None

    @property
    def padding(self) -> int:
        return 0 if self.prompts is None else self.prompts.padding
