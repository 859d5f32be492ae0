"""float32 rows to ggml's blocks: the inverse of `blocks`. Rows are [n, in]; results are bytes, row after row.

Q8_0, Q4_0 and the layouts of Q4_K and Q6_K are those of ggml-common.h. Scales and minimums of Q4_K are found as ggml's reference does
(ggml-quants.c, make_qkx2_quants): a few spreads are tried, each with the least-squares scale and minimum for its codes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from windlass.errors import BadInput
from windlass.model.formats.dllama.blocks import encode as encode_dllama
from windlass.model.formats.dllama.file import WeightType

SUPER, GROUP, SMALL_GROUP = 256, 32, 16
"""Weights of a block of the K types, and of its groups: 32 in Q4_K, 16 in Q6_K."""
SPREADS = 20
"""Tried by ggml for Q4_K: code ranges from 14 to 16."""


def _q4_k(rows: Tensor) -> Tensor:
    x = rows.reshape(-1, SUPER // GROUP, GROUP)
    scale, minimum = _scale_and_minimum(x)
    d, m = scale.amax(1) / 63, minimum.amax(1) / 63
    half_d, half_m = d.half(), m.half()
    scales, minimums = (_over(part, whole).round().clamp(0, 63) for part, whole in ((scale, d), (minimum, m)))
    group_scale, group_minimum = half_d.float()[:, None] * scales, half_m.float()[:, None] * minimums
    codes = _over(x + group_minimum[..., None], group_scale).round().clamp(0, 15).to(torch.uint8)
    pairs = codes.reshape(-1, 4, 2, GROUP)
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)
    packed = _k_scales(scales.to(torch.uint8), minimums.to(torch.uint8))
    return torch.cat([_bytes(half_d), _bytes(half_m), packed, nibbles], dim=1)


def _scale_and_minimum(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of every group: value = scale * code - minimum, code in 0..15, minimum >= 0. The best of several least-squares fits."""
    weight = x.square().mean(-1, keepdim=True).sqrt() + x.abs()  # large weights matter more, as in ggml
    low = x.amin(-1).clamp(max=0)
    spread = x.amax(-1) - low
    best_scale, best_low = spread / 15, low
    best_error = torch.full_like(low, torch.inf)
    sums = weight.sum(-1), (weight * x).sum(-1)
    for step in range(SPREADS + 1):
        codes = ((x - low[..., None]) * _over(torch.full_like(spread, 14 + 0.1 * step), spread)[..., None]).round().clamp(0, 15)
        scale, fitted = _least_squares(x, codes, weight, *sums)
        error = ((scale[..., None] * codes + fitted[..., None] - x).square() * weight).sum(-1)
        better = (error < best_error) & (scale > 0)
        best_scale, best_low = torch.where(better, scale, best_scale), torch.where(better, fitted, best_low)
        best_error = torch.where(better, error, best_error)
    return best_scale, -best_low


def _least_squares(x: Tensor, codes: Tensor, weight: Tensor, w: Tensor, wx: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and the offset (at most 0) that fit x = scale * code + offset best. `w`, `wx`: the sums of weights, and of weighted x."""
    weighted = weight * codes
    c, cc, cx = weighted.sum(-1), (weight * codes.square()).sum(-1), (weighted * x).sum(-1)
    determinant = w * cc - c * c
    scale, offset = _over(w * cx - wx * c, determinant), _over(cc * wx - c * cx, determinant)
    through_zero = _over(cx, cc)
    positive = offset > 0
    return torch.where(positive, through_zero, scale), offset.clamp(max=0)


def _k_scales(scales: Tensor, minimums: Tensor) -> Tensor:
    """Eight of each in 12 bytes, see `blocks._k_scales`."""
    low = scales[:, :4] | scales[:, 4:] >> 4 << 6
    high = minimums[:, :4] | minimums[:, 4:] >> 4 << 6
    rest = scales[:, 4:] & 15 | (minimums[:, 4:] & 15) << 4
    return torch.cat([low, high, rest], dim=1)


def _q6_k(rows: Tensor) -> Tensor:
    x = rows.reshape(-1, SUPER // SMALL_GROUP, SMALL_GROUP)
    extreme = x.gather(-1, x.abs().argmax(-1, keepdim=True)).squeeze(-1)
    scale = extreme / -32
    largest = scale.gather(-1, scale.abs().argmax(-1, keepdim=True)).squeeze(-1)
    d = (largest / -128).half()
    scales = _over(scale, d.float()).round().clamp(-128, 127)
    codes = (_over(x, d.float()[:, None] * scales).round().clamp(-32, 31) + 32).to(torch.uint8).reshape(-1, 2, 4, 32)
    low = (codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4).flatten(1)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = ((codes >> 4) << shifts).sum(2, dtype=torch.uint8).flatten(1)
    return torch.cat([low, high, scales.to(torch.int8).view(torch.uint8), _bytes(d)], dim=1)


def _over(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, 0 where whole is 0; `whole` may lack trailing dimensions."""
    whole = whole.reshape(*whole.shape, *(1,) * (part.dim() - whole.dim()))
    return torch.where(whole != 0, part / torch.where(whole != 0, whole, 1.0), 0.0)


def _bytes(halves: Tensor) -> Tensor:
    return halves.contiguous().view(torch.uint8).reshape(len(halves), -1)


def _plain(kind: WeightType) -> Callable[[Tensor], Tensor]:
    return lambda rows: torch.as_tensor(encode_dllama(rows, kind))


ENCODE: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": _plain(WeightType.F32),
    "F16": _plain(WeightType.F16),
    "Q4_0": _plain(WeightType.Q40),
    "Q8_0": _plain(WeightType.Q80),
    "Q4_K": _q4_k,
    "Q6_K": _q6_k,
}


def encode(rows: Tensor, type_name: str) -> np.ndarray:
    """Rows [n, in] as the bytes of the file."""
    rows = rows.to(torch.float32).contiguous()
    if not torch.isfinite(rows).all():
        raise BadInput("a weight is NaN or infinite; the checkpoint is damaged or its training diverged")
    return ENCODE[type_name](rows).contiguous().numpy().reshape(-1)
