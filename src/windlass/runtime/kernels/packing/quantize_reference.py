"""Quantization in plain PyTorch, byte for byte equal to native/quantize/: the reference, and the fallback without a compiler.

All in fp32, in the order of a group's elements, each operation rounded separately. Groups are columns here (SIMD lanes there), so a sum
over a group is a loop over rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.runtime.kernels.packing.statistics import Statistics

NUM_FITS = 1
SMALLEST_SCALE = 2.0**-126
LARGEST_WEIGHT = 2.0**126
MAGIC = 12582912.0
"""1.5 * 2^23: adding it rounds to an integer, ties to even."""
CHUNK = 32
LARGEST_FP8 = 448.0

Result = tuple[Tensor, Tensor, Tensor | None, Statistics]


@dataclass(frozen=True)
class _Grid:
    """value = scale * clamp(round(x / scale), low, low + 15), one of each per group."""

    scale: Tensor
    low: Tensor

    @property
    def inverse(self) -> Tensor:
        return torch.ones_like(self.scale) / self.scale

    def codes(self, t: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(_round(t), self.low), self.low + 15.0)

    def where(self, chosen: Tensor, other: _Grid) -> _Grid:
        return _Grid(torch.where(chosen, self.scale, other.scale), torch.where(chosen, self.low, other.low))


def int4(weight: Tensor, group: int, factors: Sequence[float], zero_points: bool) -> Result:
    """Codes, scales, zero points [n, groups] (not packed) and statistics; see `quantize.int4`."""
    rows = weight.shape[0]
    x, num_unusable = _usable(weight.reshape(-1, group).float().T.contiguous())
    grid = _search(x, factors, zero_points)
    t = x * grid.inverse
    codes = grid.codes(t)
    rest = (x - codes * grid.scale) * grid.inverse
    statistics = _statistics(_sum(rest * rest).double(), _sum(t * t).double(), grid.scale, num_unusable)
    packed = _pack_nibbles((codes - grid.low).to(torch.uint8).T.contiguous())
    zeros = (-8.0 - grid.low).to(torch.int8).view(rows, -1) if zero_points else None
    return packed.view(rows, -1), grid.scale.to(torch.bfloat16).view(rows, -1), zeros, statistics


def int8(weight: Tensor, group: int) -> Result:
    x, num_unusable = _usable(weight.reshape(-1, group).float().T.contiguous())
    scale = _bf16_scale(_largest(x) / 127.0)
    t = x * (torch.ones_like(scale) / scale)
    codes = torch.clamp(_round(t), -128.0, 127.0)
    stored = (codes + 128.0).to(torch.uint8).T.reshape(weight.shape)
    packed = torch.nn.functional.pad(stored, (0, -weight.shape[1] % 4)).contiguous().view(torch.int32)
    statistics = _byte_statistics(x, t, codes, scale, num_unusable)
    return packed, scale.to(torch.bfloat16).view(weight.shape[0], -1), None, statistics


def fp8(weight: Tensor) -> Result:
    x, num_unusable = _usable(weight.float().T.contiguous())
    scale = torch.clamp(_largest(x) / LARGEST_FP8, min=SMALLEST_SCALE)
    t = x * (torch.ones_like(scale) / scale)
    codes = torch.clamp(t, -LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn)
    statistics = _byte_statistics(x, t, codes.float(), scale, num_unusable)
    return codes.view(torch.uint8).T.contiguous().view(torch.float8_e4m3fn), scale.view(-1, 1), None, statistics


# --- the search ------------------------------------------------------------------------------------------------------


def weighted_grid(
    weight: Tensor, group: int, factors: Sequence[float], zero_points: bool, importance: Tensor
) -> tuple[Tensor, Tensor, int]:
    """Scales and lowest codes [rows, groups], by errors weighted with each input's `importance`; and the number of unusable weights."""
    rows, groups = weight.shape[0], weight.shape[1] // group
    x, num_unusable = _usable(weight.reshape(-1, group).float().T.contiguous())
    grid = _search(x, factors, zero_points, importance.view(groups, group).T.repeat(1, rows))
    return grid.scale.view(rows, groups), grid.low.view(rows, groups), num_unusable


def _search(x: Tensor, factors: Sequence[float], zero_points: bool, weights: Tensor | None = None) -> _Grid:
    highest, lowest = x.amax(dim=0), x.amin(dim=0)
    highest = torch.where(highest > 0, highest, torch.zeros_like(highest))
    lowest = torch.where(lowest < 0, lowest, torch.zeros_like(lowest))
    candidate = _with_zero_point if zero_points else _symmetric
    best = candidate(lowest, highest, factors[0])
    if len(factors) == 1:
        return best
    unit = best.inverse  # errors are compared in units of the first scale
    least = torch.full_like(unit, float("inf"))
    for factor in factors:
        best, least = _better(x, best, least, candidate(lowest, highest, factor), unit, weights)
    for _ in range(NUM_FITS):
        best, least = _better(x, best, least, _refitted(x, best, weights), unit, weights)
    return best


def _symmetric(lowest: Tensor, highest: Tensor, factor: float) -> _Grid:
    extreme = torch.where(highest >= -lowest, highest, lowest)
    return _Grid(_bf16_scale(extreme * -factor), torch.full_like(extreme, -8.0))


def _with_zero_point(lowest: Tensor, highest: Tensor, factor: float) -> _Grid:
    scale = _bf16_scale(highest * factor - lowest * factor)
    inverse = torch.ones_like(scale) / scale
    middle = (highest * inverse + lowest * inverse) * 0.5
    zero = torch.clamp(_round(-0.5 - middle), -8.0, 7.0)
    return _Grid(scale, -8.0 - zero)


def _better(x: Tensor, best: _Grid, least: Tensor, grid: _Grid, unit: Tensor, weights: Tensor | None) -> tuple[_Grid, Tensor]:
    t = x * grid.inverse
    rest = t - grid.codes(t)
    ratio = grid.scale * unit
    error = _sum(_weighted(rest * rest, weights)) * (ratio * ratio)
    chosen = error < least
    return grid.where(chosen, best), torch.where(chosen, error, least)


def _weighted(values: Tensor, weights: Tensor | None) -> Tensor:
    return values if weights is None else values * weights


def _refitted(x: Tensor, grid: _Grid, weights: Tensor | None) -> _Grid:
    """The same codes with their least-squares scale."""
    t = x * grid.inverse
    codes = grid.codes(t)
    if weights is None:
        ratio = _sum(t * codes) / torch.clamp(_sum(codes * codes), min=1.0)
    else:
        size = _sum(codes * codes * weights)
        ratio = torch.where(size > 0, _sum(t * codes * weights) / size, torch.ones_like(size))
    return _Grid(_bf16_scale(grid.scale * ratio), grid.low)


# --- arithmetic ------------------------------------------------------------------------------------------------------


def _round(x: Tensor) -> Tensor:
    return (x + MAGIC) - MAGIC


def _bf16_scale(scale: Tensor) -> Tensor:
    return torch.copysign(torch.clamp(scale.abs(), min=SMALLEST_SCALE), scale).to(torch.bfloat16).float()


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax(dim=0)


def _sum(rows: Tensor) -> Tensor:
    """In order, which torch.sum does not guarantee."""
    total = torch.zeros_like(rows[0])
    for row in rows:
        total += row
    return total


def _usable(x: Tensor) -> tuple[Tensor, int]:
    """Groups with a NaN, Inf or value beyond LARGEST_WEIGHT become zero; also the number of such values."""
    bad = ~(x.abs() <= LARGEST_WEIGHT)
    count = int(bad.sum())
    return (torch.where(bad.any(dim=0), torch.zeros_like(x), x) if count else x), count


def _pack_nibbles(stored: Tensor) -> Tensor:
    """[groups, length] of 0 .. 15 to int32, lowest nibble first."""
    return (stored[:, 0::2] | (stored[:, 1::2] << 4)).contiguous().view(torch.int32)


def _byte_statistics(x: Tensor, t: Tensor, codes: Tensor, scale: Tensor, num_unusable: int) -> Statistics:
    rest = (x - codes * scale) * (torch.ones_like(scale) / scale)
    return _statistics(_chunked(rest * rest), _chunked(t * t), scale, num_unusable)


def _chunked(squares: Tensor) -> Tensor:
    """Sums in fp32 of 32 elements, and in double of those."""
    total = torch.zeros(squares.shape[1], dtype=torch.float64, device=squares.device)
    for chunk in squares.split(CHUNK):
        total += _sum(chunk).double()
    return total


def _statistics(error: Tensor, weight: Tensor, scale: Tensor, num_unusable: int) -> Statistics:
    if error.numel() == 0:
        return Statistics()
    square = scale.double() * scale.double()
    relative = torch.where(weight > 0, error / weight, torch.zeros_like(error))
    worst = relative.max()
    first = int((relative == worst).nonzero()[0]) if worst > 0 else -1
    # cumsum adds in order, torch.sum does not.
    sums = [float((part * square).cumsum(0)[-1]) for part in (error, weight)]
    return Statistics(sums[0], sums[1], float(worst), first, num_unusable)
