"""Attention over cached keys and values: multi-head, grouped-query or multi-query."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from windlass.core import model
from windlass.core.ports import Weights
from windlass.runtime.kernels.arguments import AttentionArgs, QkvArgs
from windlass.runtime.kernels.head_groups import spans_of
from windlass.runtime.kernels.ops.attention import attention
from windlass.runtime.kernels.ops.qkv import split_qkv
from windlass.runtime.kernels.step import KvCache, Step, attention_cache
from windlass.runtime.nn.linear import Linear, as_parameter
from windlass.runtime.nn.mixers.positions import Rotary, alibi_slopes
from windlass.runtime.nn.parallel.shard import WHOLE, ModelShard


class AttentionMixer(nn.Module):
    slopes: Tensor | None

    def __init__(
        self,
        spec: model.ModelSpec,
        mixer: model.Attention,
        weights: Weights,
        name: str,
        rotary: Rotary | None,
        shard: ModelShard = WHOLE,
    ) -> None:
        super().__init__()
        (first, last), (kv_first, kv_last) = shard.heads(mixer.num_heads), shard.kv_heads(mixer.num_kv_heads)
        self.num_heads, self.num_kv_heads, self.head_dim = last - first, kv_last - kv_first, mixer.head_dim
        group = mixer.num_heads // mixer.num_kv_heads
        self.spans = spans_of(self.num_heads, self.num_kv_heads, group, first - kv_first * group)
        self.scale = mixer.head_dim**-0.5 if mixer.scale is None else mixer.scale
        self.window, self.eps = mixer.window, spec.norm.eps
        self.rotary = rotary
        self.qkv = Linear(weights, f"{name}.q", f"{name}.k", f"{name}.v")
        self.o = Linear(weights, f"{name}.o", biased=shard.adds_bias)
        self.q_norm = as_parameter(weights.vector(f"{name}.q_norm.weight")) if mixer.qk_norm else None
        self.k_norm = as_parameter(weights.vector(f"{name}.k_norm.weight")) if mixer.qk_norm else None
        self.sinks = as_parameter(weights.vector(f"{name}.sinks")) if mixer.sinks else None
        slopes = alibi_slopes(spec.positions, mixer.num_heads, self.scale) if isinstance(spec.positions, model.Alibi) else None
        own = None if slopes is None else slopes[first:last].to(weights.device)
        self.register_buffer("slopes", own, persistent=False)

    def forward(self, x: Tensor, step: Step, cache: KvCache | None, add: Tensor | None = None) -> Tensor:
        q, k, v = split_qkv(
            QkvArgs(
                self.qkv(x),
                self.num_heads,
                self.num_kv_heads,
                self.head_dim,
                norms=None if self.q_norm is None else (self.q_norm, self.k_norm),
                eps=self.eps,
                table=None if self.rotary is None else self.rotary.table,
                interleaved=self.rotary is not None and self.rotary.interleaved,
                positions=step.positions,
                cache=cache,
                slots=step.slots,
            )
        )
        args = AttentionArgs(q, k, v, step, cache, self.scale, self.window, self.sinks, self.slopes, self.spans)
        mixed = attention(args)
        return self.o(mixed, add)

    def make_cache(self, num_blocks: int, dtype: torch.dtype, device: str) -> KvCache:
        return attention_cache(num_blocks, self.num_kv_heads, self.head_dim, dtype, device)
