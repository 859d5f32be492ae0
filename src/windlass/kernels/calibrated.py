"""Int4 codes that know what the matrix will be multiplied with: errors of one input are made good by the inputs that follow it.

Rounding weight by weight minimises the error of the weights. What counts is the error of their products with real inputs x, whose
second moments H = sum of x x^T are measured first. Going through the inputs in order, the error of one is spread over those not
yet rounded so that the products change least (GPTQ, arXiv 2210.17323; optimal brain surgeon before it). With U the upper Cholesky
factor of H^-1, rounding input j with error e adds -e / U_jj * U_j,k to every later weight k. Rows do not know each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.kernels import quantize
from windlass.kernels.quantize import Quantized
from windlass.kernels.statistics import Statistics

DAMPING = 0.01
"""Of the mean second moment, added to all: inputs that were hardly ever seen must not take unbounded corrections (as published)."""


def factor_of(moments: Tensor, damping: float = DAMPING) -> Tensor:
    """The upper Cholesky factor of the inverse of `moments` [in, in], in fp32. Inputs that never came count as unrelated to all."""
    moments = moments.double()
    seen = moments.diagonal()
    mean = seen.mean() if bool(seen.any()) else torch.ones((), dtype=torch.float64)
    damped = moments + torch.diag(torch.where(seen > 0, damping * mean, mean))
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True).float()


def int4(weight: Tensor, group: int, factor: Tensor, *, zero_points: bool = False) -> Quantized:
    """As quantize.int4, with the error of each input carried on. `factor`: of all inputs, from `factor_of`."""
    original = weight.float()
    left = original.clone()
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    scales, zeros = [], []
    for start in range(0, weight.shape[1], group):
        stop = start + group
        grid = quantize.int4(left[:, start:stop], group, zero_points=zero_points)
        scale = grid.scale.float()
        low = _lowest(grid, weight.shape[0])
        errors = _round_group(left[:, start:stop], scale, low, factor[start:stop, start:stop], codes[:, start:stop])
        left[:, stop:] -= errors @ factor[start:stop, stop:]
        scales.append(grid.scale)
        zeros.append(grid.zero_point)
    scale = torch.cat(scales, dim=1)
    zero_point = torch.cat(zeros, dim=1) if zero_points else None
    packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).contiguous().view(torch.int32)
    return Quantized(packed, scale, zero_point, _statistics(original, codes, scale, zero_point, group))


def _round_group(columns: Tensor, scale: Tensor, low: Tensor, factor: Tensor, codes: Tensor) -> Tensor:
    """Rounds a group's inputs one after the other into `codes`; returns each error over its diagonal, for what comes after."""
    errors = torch.empty_like(columns)
    for index in range(columns.shape[1]):
        column = columns[:, index : index + 1]
        code = torch.clamp(torch.round(column / scale) - low, 0, 15)
        codes[:, index : index + 1] = code.to(torch.uint8)
        error = (column - (code + low) * scale) / factor[index, index]
        errors[:, index : index + 1] = error
        columns[:, index + 1 :] -= error @ factor[index : index + 1, index + 1 :]
    return errors


def _lowest(grid: Quantized, rows: int) -> Tensor:
    """The number that code 0 stands for, in steps: -8, moved by the zero point."""
    if grid.zero_point is None:
        return torch.full((rows, 1), -8.0)
    return -8.0 - quantize.unpack_zero_points(grid.zero_point, rows).float()


def _statistics(weight: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor | None, group: int) -> Statistics:
    """Of the weights, as for any other rounding, though it is not what was minimised."""
    rows, groups = weight.shape[0], weight.shape[1] // group
    zeros = 0.0 if zero_point is None else quantize.unpack_zero_points(zero_point, rows).float().unsqueeze(-1)
    stored = (codes.view(rows, groups, group).float() - 8.0 - zeros) * scale.float().unsqueeze(-1)
    error = (weight.view(rows, groups, group) - stored).double().square().sum(-1)
    size = weight.view(rows, groups, group).double().square().sum(-1)
    relative = torch.where(size > 0, error / size, torch.zeros_like(error)).flatten()
    worst = int(relative.argmax()) if relative.numel() and bool(relative.max() > 0) else -1
    num_unusable = int((~(weight.abs() <= 2.0**126)).sum())
    return Statistics(float(error.sum()), float(size.sum()), float(relative[worst]) if worst >= 0 else 0.0, worst, num_unusable)
