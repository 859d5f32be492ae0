"""The decoder's forward pass in a few kernels per layer (kernels/cuda): the same weights and the same mathematics as nn/decoder.py.

The residual stream is fp32; what a half layer adds to it stays in partial sums until the next norm reads them, which saves a pass over
memory. One row: norms are fused into the products; up to 64 rows: weights are streamed; more: WGMMA products. core/fused.py says which
models are supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from windlass.core.fused import HEAD_DIM
from windlass.core.model import ModelSpec
from windlass.kernels.arguments import AttentionArgs
from windlass.kernels.cuda import attention as heads
from windlass.kernels.cuda import driver, linear, norm
from windlass.kernels.cuda.layout import Tiles
from windlass.kernels.ops.attention import attention
from windlass.kernels.step import KvCache, Step
from windlass.nn.fused.feed_forward import DenseFeed, RoutedFeed, wide_product
from windlass.nn.layer import DecoderLayer
from windlass.nn.mixers.attention import AttentionMixer
from windlass.nn.moe import MixtureOfExperts

MAX_ROWS = 64
"""Beyond, products are compute-bound."""
DEPENDENT_ROWS = 64
"""Up to this many rows, programmatic dependent launch: 2 % faster at 64 rows, 10 % at one."""
FRESH_SEQUENCES = 16
"""Up to this many new prompts in a step use PyTorch's attention, one call each."""


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
        norm.add_norm(self.h, weight, x, self.eps, parts=self.parts, weights=self.weights)
        self.parts = self.weights = None
        return x


class FusedLayer:
    def __init__(self, layer: DecoderLayer, eps: float) -> None:
        assert isinstance(layer.mixer, AttentionMixer)
        self.mixer, self.eps = layer.mixer, eps
        self.norm, self.ffn_norm = layer.mixer_norm.weight, layer.ffn_norm.weight
        self.qkv: Tiles = layer.mixer.qkv.weight
        self.out: Tiles = layer.mixer.o.weight
        feed = layer.feed_forward
        self.feed = RoutedFeed(feed) if isinstance(feed, MixtureOfExperts) else DenseFeed(feed)

    def one(self, h: Tensor, step: Step, cache: KvCache, space: AttentionLaunch) -> None:
        """h fp32 [hidden], in place."""
        qkv = torch.empty(1, self.qkv.rows, dtype=torch.bfloat16, device=h.device)
        linear.linear_one(h, self.qkv, qkv[0], bias=self.mixer.qkv.bias, norm=self.norm, eps=self.eps)
        linear.linear_one(self._decoded(qkv, step, cache, space)[0], self.out, h, residual=h)
        self.feed.one(h, self.ffn_norm, self.eps)

    def several(self, stream: ResidualStream, step: Step, cache: KvCache, space: AttentionLaunch) -> None:
        """2 to 64 rows."""
        x = stream.normed(self.norm)
        rows, few = x.shape[0], x.shape[0] <= 8
        qkv = torch.empty(rows, self.qkv.rows, dtype=torch.bfloat16, device=x.device)
        product = linear.linear_eight if few and linear.num_slices(self.qkv) == 1 else linear.linear_wide
        product(x, self.qkv, qkv, bias=self.mixer.qkv.bias)
        stream.parts = linear.linear_parts(self._attended(qkv, step, cache, space), self.out)
        x = stream.normed(self.ffn_norm)
        stream.parts, stream.weights = self.feed.several(x)

    def wide(self, stream: ResidualStream, step: Step, cache: KvCache, space: AttentionLaunch) -> None:
        """Any number of rows."""
        x = stream.normed(self.norm)
        qkv = torch.empty(x.shape[0], self.qkv.rows, dtype=torch.bfloat16, device=x.device)
        linear.linear_wide(x, self.qkv, qkv, bias=self.mixer.qkv.bias)
        stream.parts = linear.linear_parts(self._attended(qkv, step, cache, space), self.out)
        stream.parts, stream.weights = self.feed.wide(stream.normed(self.ffn_norm))

    # --- attention

    def _attended(self, qkv: Tensor, step: Step, cache: KvCache, space: AttentionLaunch) -> Tensor:
        if step.tokens.shape[0] == step.lengths.shape[0]:
            return self._decoded(qkv, step, cache, space)
        return self._prefilled(qkv, step, cache)

    def _normed_heads(self, qkv: Tensor) -> None:
        if self.mixer.q_norm is not None:
            heads.head_norm(qkv, self.mixer.q_norm, self.mixer.k_norm, self.mixer.num_kv_heads, self.eps)

    def _decoded(self, qkv: Tensor, step: Step, cache: KvCache, space: AttentionLaunch) -> Tensor:
        """Decode: one new token per sequence."""
        self._normed_heads(qkv)
        mixer, rotary = self.mixer, self.mixer.rotary
        assert rotary is not None and cache.values is not None
        out = torch.empty(qkv.shape[0], mixer.num_heads * mixer.head_dim, dtype=qkv.dtype, device=qkv.device)
        return heads.decode_attention(
            qkv, rotary.table, step.positions, step.slots, step.lengths, step.blocks, cache.keys, cache.values, out, space.attention,
            scale=mixer.scale, splits=space.splits, shape=space.shape, interleaved=rotary.interleaved,
        )  # fmt: skip

    def _prefilled(self, qkv: Tensor, step: Step, cache: KvCache) -> Tensor:
        """Prefill: several tokens per sequence."""
        self._normed_heads(qkv)
        mixer, rotary, dim = self.mixer, self.mixer.rotary, self.mixer.head_dim
        assert rotary is not None
        heads.rotate_store(
            qkv, rotary.table, step.positions, step.slots, cache.keys, cache.values, mixer.num_kv_heads,
            interleaved=rotary.interleaved,
        )  # fmt: skip
        q, k, v = qkv.view(qkv.shape[0], -1, dim).split((mixer.num_heads, mixer.num_kv_heads, mixer.num_kv_heads), dim=1)
        bounds = step.fresh_bounds()
        if bounds is None or len(bounds) > FRESH_SEQUENCES:
            return attention(AttentionArgs(q, k, v, step, cache, scale=mixer.scale))
        mixed = [_whole(q[a:b], k[a:b], v[a:b], mixer.scale) for a, b in bounds]
        return torch.cat(mixed) if len(mixed) > 1 else mixed[0]


def _whole(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """A new sequence: [tokens, heads, dim] -> [tokens, heads * dim]."""
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        out = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, scale=scale, enable_gqa=True
        )
    return out[0].transpose(0, 1).reshape(q.shape[0], -1)


@dataclass(frozen=True)
class AttentionLaunch:
    """The launch shape of a step's decode attention, and its workspace."""

    attention: heads.AttentionWorkspace
    splits: int
    shape: tuple[int, int]


class FusableDecoder(Protocol):
    """What the fused pass uses of a decoder."""

    spec: ModelSpec
    layers: Any
    table: Any
    norm: Any
    head: Any


class FusedDecoder:
    def __init__(self, decoder: FusableDecoder) -> None:
        spec = decoder.spec
        self.decoder, self.eps = decoder, spec.norm.eps
        self.layers = [FusedLayer(layer, spec.norm.eps) for layer in decoder.layers]
        self.num_heads, self.num_kv_heads = self.layers[0].mixer.num_heads, self.layers[0].mixer.num_kv_heads
        # Counters of finished splits; zero between launches.
        self._arrived = torch.zeros(1024 * self.num_kv_heads, dtype=torch.int32, device=decoder.table.device)

    def __call__(self, step: Step, caches: Sequence[KvCache]) -> Tensor:
        """fp32 [logit rows, vocabulary] of a step without padding."""
        rows = step.tokens.shape[0]
        h = torch.nn.functional.embedding(step.tokens, self.decoder.table).float()
        with driver.dependent_launches(rows <= DEPENDENT_ROWS):
            return self._one(h[0], step, caches) if rows == 1 else self._more(ResidualStream(h, self.eps), step, caches)

    def experts_touched(self, rows: int) -> float | None:
        """Average number of experts used per routed layer by the last step of up to 64 rows. Synchronizes."""
        ids = [layer.feed.chosen(rows).ids for layer in self.layers if isinstance(layer.feed, RoutedFeed)]
        return sum(chosen.unique().numel() for chosen in ids) / len(ids) if ids and rows <= MAX_ROWS else None

    def _one(self, h: Tensor, step: Step, caches: Sequence[KvCache]) -> Tensor:
        space = self._space(step)
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.one(h, step, cache, space)
        head = self.decoder.head
        logits = torch.empty(1, head.shape[0], dtype=torch.float32, device=h.device)
        if step.logit_rows.shape[0] == 0:
            return logits[:0]
        norm.head_one(h, self.decoder.norm.weight, head, logits[0], self.eps)
        return logits

    def _more(self, stream: ResidualStream, step: Step, caches: Sequence[KvCache]) -> Tensor:
        rows, space = stream.h.shape[0], self._space(step)
        for layer, cache in zip(self.layers, caches, strict=True):
            (layer.several if rows <= MAX_ROWS else layer.wide)(stream, step, cache, space)
        x = stream.normed(self.decoder.norm.weight)
        if step.logit_rows.shape[0] != rows:
            x = x[step.logit_rows]
        return wide_product(x, self.decoder.head)

    def _space(self, step: Step) -> AttentionLaunch:
        num_sequences = step.lengths.shape[0]
        splits, shape = heads.launch_shape(step.longest(), num_sequences, self.num_kv_heads)
        size = num_sequences * self.num_heads * splits * (HEAD_DIM + 2)
        partial = torch.empty(size, dtype=torch.float32, device=step.lengths.device)
        return AttentionLaunch(heads.AttentionWorkspace(partial, self._arrived), splits, shape)
