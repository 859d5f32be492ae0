"""Rotary position embeddings (arXiv 2104.09864): the table of angles with every context scaling, and the rotation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from windlass.core.model import BandScaling, LinearScaling, Rope, YarnScaling
from windlass.runtime.kernels.precision import widened


def rotary_table(positions: Rope, max_positions: int) -> Tensor:
    """fp32 [max_positions, 2, rotary_dim / 2]: cosines and sines, times the attention factor where scaling has one.

    Angles are computed in fp32, as in the code that models were trained with; a more exact table would differ from it.
    """
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * _frequencies(positions)
    return torch.stack((angles.cos(), angles.sin()), dim=1) * _attention_factor(positions)


def rotate(x: Tensor, table: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """The first dimensions of every head of x [rows, heads, dim], as many as the table has angles for. Plain PyTorch."""
    rotary_dim = 2 * table.shape[-1]
    cos, sin = widened(table[positions.long()]).unbind(1)
    cos, sin = cos[:, None], sin[:, None]
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = turned.chunk(2, dim=-1)
        pairs = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((pairs.to(x.dtype), rest), dim=-1)


def attention_temperature(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention temperature for a context scaled by `factor` (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _frequencies(rope: Rope) -> Tensor:
    """Radians per token of each pair."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    plain = 1.0 / rope.theta**exponents
    match rope.scaling:
        case None:
            return plain
        case LinearScaling(factor=factor):
            return plain / factor
        case BandScaling():
            return _banded(plain, rope.scaling)
        case YarnScaling():
            return _yarn(plain, rope, rope.scaling)


def _banded(plain: Tensor, scaling: BandScaling) -> Tensor:
    """High frequencies are kept, low ones are divided by `factor` (Llama 3)."""
    turns = scaling.original_context_tokens * plain / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return _mixed(plain, scaling.factor, kept.clamp(0, 1))


def _yarn(plain: Tensor, rope: Rope, scaling: YarnScaling) -> Tensor:
    """As bands, but with a ramp over the index of the pair rather than over its number of rotations."""
    low, high = (_pair_with_rotations(beta, rope, scaling) for beta in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low or 0.001  # avoids a division by zero, as in the original code
    slowed = (torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / width
    return _mixed(plain, scaling.factor, 1 - slowed.clamp(0, 1))


def _pair_with_rotations(times: float, rope: Rope, scaling: YarnScaling) -> float:
    """The (fractional) pair that makes this many rotations within the original context."""
    pace = math.log(scaling.original_context_tokens / (times * 2 * math.pi))
    return rope.rotary_dim * pace / (2 * math.log(rope.theta))


def _mixed(plain: Tensor, factor: float, kept: Tensor) -> Tensor:
    return plain / factor * (1 - kept) + plain * kept


def _attention_factor(rope: Rope) -> float:
    scaling = rope.scaling
    if not isinstance(scaling, YarnScaling):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        # The part for all dimensions is in the softmax scale (runtime/nn/mixers/latent.py).
        shared = attention_temperature(scaling.factor, scaling.mscale_all_dim)
        return attention_temperature(scaling.factor, scaling.mscale) / shared
    return attention_temperature(scaling.factor)
