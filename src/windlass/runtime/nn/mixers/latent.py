"""Latent attention (arXiv 2405.04434, section 2.1): all heads share one compressed latent per token, and only that is cached.

A head's key is `up_keys @ latent`, so its score is (q @ up_keys) @ latent: queries are projected to the latent instead of every cached
token to the heads (weight absorption). Values likewise: latents are averaged first and projected then. What remains is multi-query
attention with one wide key head, whose first part is the values.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor, nn

from windlass.core import model
from windlass.core.ports import Weights
from windlass.runtime.kernels.arguments import AttentionArgs, LatentArgs
from windlass.runtime.kernels.ops.attention import attention
from windlass.runtime.kernels.ops.heads import heads_matmul
from windlass.runtime.kernels.ops.latent import join_latent
from windlass.runtime.kernels.ops.linear import plain_product
from windlass.runtime.kernels.ops.rotary import attention_temperature, rotate
from windlass.runtime.kernels.step import KvCache, Step, latent_cache
from windlass.runtime.nn.linear import Linear, as_parameter
from windlass.runtime.nn.mixers.positions import Rotary
from windlass.runtime.nn.norm import NormLayer
from windlass.runtime.nn.parallel.shard import WHOLE, ModelShard

INNER_EPS = 1e-6
"""Of the norms within the mixer, independent of the model's own: the published code leaves them at this default."""


class LatentAttentionMixer(nn.Module):
    def __init__(
        self,
        spec: model.ModelSpec,
        mixer: model.LatentAttention,
        weights: Weights,
        name: str,
        rotary: Rotary,
        shard: ModelShard = WHOLE,
    ) -> None:
        super().__init__()
        first, last = shard.heads(mixer.num_heads)
        mixer = msgspec.structs.replace(mixer, num_heads=last - first)  # of this rank
        self.shape, self.rotary = mixer, rotary
        self.scale = _scale(mixer, spec.positions)
        inner = model.Norm(kind="rms", eps=INNER_EPS)
        if mixer.q_lora_rank is None:
            self.q = Linear(weights, f"{name}.q")
        else:
            self.q = nn.Sequential(
                Linear(weights, f"{name}.q_a"), NormLayer(inner, weights, f"{name}.q_a_norm"), Linear(weights, f"{name}.q_b")
            )
        self.kv = Linear(weights, f"{name}.kv_a")
        self.kv_norm = NormLayer(inner, weights, f"{name}.kv_a_norm")
        self.up = UpProjection(mixer, weights, f"{name}.kv_b")
        self.o = Linear(weights, f"{name}.o", biased=shard.adds_bias)

    def forward(self, x: Tensor, step: Step, cache: KvCache | None, add: Tensor | None = None) -> Tensor:
        if cache is None and torch.is_grad_enabled() and x.requires_grad:
            return self._without_absorption(x, step, add)
        rows, shape = x.shape[0], self.shape
        up_keys, up_values = self.up()
        q = self.q(x).view(rows, shape.num_heads, shape.nope_head_dim + shape.rope_head_dim)
        queries, keys = join_latent(
            LatentArgs(
                heads_matmul(q[..., : shape.nope_head_dim], up_keys),
                q,
                self.kv(x),
                norm=self.kv_norm.weight,
                eps=self.kv_norm.eps,
                table=self.rotary.table,
                interleaved=self.rotary.interleaved,
                positions=step.positions,
                cache=cache,
                slots=step.slots,
            )
        )
        mixed = attention(AttentionArgs(queries, keys, keys[..., : shape.kv_lora_rank], step, cache, scale=self.scale))
        values = heads_matmul(mixed.view(rows, shape.num_heads, shape.kv_lora_rank), up_values)
        return self.o(values.view(rows, shape.num_heads * shape.v_head_dim), add)

    def _without_absorption(self, x: Tensor, step: Step, add: Tensor | None) -> Tensor:
        """For training: without a cache every token is projected to its heads once, which gives narrower heads that fused kernels support."""
        rows, shape, table, interleaved = x.shape[0], self.shape, self.rotary.table, self.rotary.interleaved
        q = self.q(x).view(rows, shape.num_heads, shape.nope_head_dim + shape.rope_head_dim)
        latent, shared = self.kv(x).split((shape.kv_lora_rank, shape.rope_head_dim), -1)
        keys, values = self.up.keys_and_values(self.kv_norm(latent))
        rotated_q = rotate(q[..., shape.nope_head_dim :], table, step.positions, interleaved)
        rotated_k = rotate(shared[:, None], table, step.positions, interleaved).expand(-1, shape.num_heads, -1)
        queries = torch.cat((q[..., : shape.nope_head_dim], rotated_q), dim=-1)
        mixed = attention(AttentionArgs(queries, torch.cat((keys, rotated_k), dim=-1), values, step, None, scale=self.scale))
        return self.o(mixed, add)

    def make_cache(self, num_blocks: int, dtype: torch.dtype, device: str) -> KvCache:
        return latent_cache(num_blocks, self.shape.kv_lora_rank, self.shape.rope_head_dim, dtype, device)


class UpProjection(nn.Module):
    """Up-projections from the latent to keys and values: [heads, nope, latent] and [heads, latent, value dim].

    One matrix in the checkpoint and while training; for inference each half is stored contiguously.
    """

    def __init__(self, mixer: model.LatentAttention, weights: Weights, name: str) -> None:
        super().__init__()
        self.shape = mixer
        weight = as_parameter(weights.dense_matrix(f"{name}.weight"))
        self.weight = weight if weight.requires_grad else None
        self.keys, self.values = (None, None) if weight.requires_grad else map(_contiguous, self._sides(weight))

    def forward(self) -> tuple[Tensor, Tensor]:
        if self.weight is None:
            return self.keys, self.values
        return self._sides(self.weight)

    def keys_and_values(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """latent [rows, latent] -> [rows, heads, nope] and [rows, heads, value dim]."""
        if self.weight is None:
            up_keys, up_values = self()
            return torch.einsum("rl,hnl->rhn", latent, up_keys.to(latent.dtype)), torch.einsum(
                "rl,hlv->rhv", latent, up_values.to(latent.dtype)
            )
        both = plain_product(latent, self.weight, None).unflatten(1, (self.shape.num_heads, -1))
        keys, values = both.split((self.shape.nope_head_dim, self.shape.v_head_dim), -1)
        return keys, values

    def _sides(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = weight.unflatten(0, (self.shape.num_heads, -1)).split((self.shape.nope_head_dim, self.shape.v_head_dim), 1)
        return keys, values.transpose(1, 2)


def _contiguous(side: Tensor) -> nn.Parameter:
    return nn.Parameter(side.contiguous(), requires_grad=False)


def _scale(mixer: model.LatentAttention, positions: model.Positions) -> float:
    """YaRN's temperature for all dimensions, of queries and of keys: the rotary table only affects some of them."""
    scale = (mixer.nope_head_dim + mixer.rope_head_dim) ** -0.5
    scaling = positions.scaling if isinstance(positions, model.Rope) else None
    if isinstance(scaling, model.YarnScaling) and scaling.mscale_all_dim:
        return scale * attention_temperature(scaling.factor, scaling.mscale_all_dim) ** 2
    return scale
