"""Int4 codes that know what the matrix will be multiplied with: errors of one input are made good by the inputs after it.

Rounding weight by weight minimises the error of the weights. What counts is the error of their products with real inputs x, whose
second moments H = sum of x x^T are measured first. The inputs are rounded one after the other, the strongest first, and the error of
each is spread over those not yet rounded so that the products change least (GPTQ, arXiv 2210.17323; optimal brain surgeon before it).
With U the upper Cholesky factor of H^-1, rounding input j with error e adds -e / U_jj * U_jk to every later weight k. Scales are those
of plain rounding, found before. Rows do not know each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.kernels import quantize
from windlass.kernels.quantize import Quantized
from windlass.kernels.statistics import Statistics

DAMPING = 0.01
"""Of the mean second moment, added to all: inputs that were hardly ever seen must not take unbounded corrections (as published)."""
BLOCK = 64
"""Inputs whose errors are spread within the block at once, and beyond it together."""


@dataclass(frozen=True)
class Inputs:
    """What is known of a matrix's inputs."""

    order: Tensor
    """Strongest first."""
    factor: Tensor
    """Upper Cholesky factor of the inverse moments, rows and columns in that order."""


def inputs_from(moments: Tensor, damping: float = DAMPING) -> Inputs:
    """From second moments [in, in]. Inputs that never came count as unrelated to all."""
    seen = moments.diagonal().double()
    order = seen.argsort(descending=True, stable=True)
    mean = seen.mean() if bool(seen.any()) else torch.ones((), dtype=torch.float64)
    damped = moments.double()[order][:, order] + torch.diag(torch.where(seen > 0, damping * mean, mean)[order])
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return Inputs(order, torch.linalg.cholesky(inverse, upper=True).float())


def int4(weight: Tensor, group: int, inputs: Inputs, *, zero_points: bool = False) -> Quantized:
    """As quantize.int4, with the error of each input carried on."""
    grid = quantize.int4(weight, group, zero_points=zero_points)
    rows, width = weight.shape
    # Inputs are rows here: each is rounded at once for all outputs, and its numbers lie side by side.
    groups = inputs.order // group
    scale, low = grid.scale.float().T[groups], _lowest(grid, rows).T[groups]
    left = weight.float().T[inputs.order]
    chosen = torch.empty(width, rows, dtype=torch.uint8)
    for start in range(0, width, BLOCK):
        span = slice(start, min(start + BLOCK, width))
        errors = _round(left[span], scale[span], low[span], inputs.factor[span, span], chosen[span])
        left[span.stop :] -= inputs.factor[span, span.stop :].T @ errors
    codes = torch.empty(rows, width, dtype=torch.uint8)
    codes[:, inputs.order] = chosen.T
    packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).contiguous().view(torch.int32)
    return Quantized(packed, grid.scale, grid.zero_point, _statistics(weight.float(), codes, grid, group))


def _round(left: Tensor, scale: Tensor, low: Tensor, factor: Tensor, codes: Tensor) -> Tensor:
    """Rounds inputs one after the other into `codes`; returns each error over its diagonal, for what comes after."""
    errors = torch.empty_like(left)
    for index in range(left.shape[0]):
        code = torch.clamp_(torch.round(left[index] / scale[index]).sub_(low[index]), 0, 15)
        codes[index] = code.to(torch.uint8)
        errors[index] = (left[index] - (code + low[index]) * scale[index]) / factor[index, index]
        left[index + 1 :].addr_(factor[index, index + 1 :], errors[index], alpha=-1)
    return errors


def _lowest(grid: Quantized, rows: int) -> Tensor:
    """The number that code 0 stands for, in steps: -8, moved by the zero point. [rows, groups or 1]"""
    if grid.zero_point is None:
        return torch.full(grid.scale.shape, -8.0)
    return -8.0 - quantize.unpack_zero_points(grid.zero_point, rows)


def _statistics(weight: Tensor, codes: Tensor, grid: Quantized, group: int) -> Statistics:
    """Of the weights, as for any other rounding, though it is not what was minimised."""
    shape = (weight.shape[0], weight.shape[1] // group, group)
    low = _lowest(grid, shape[0]).unsqueeze(-1)
    stored = (codes.view(shape).float() + low) * grid.scale.float().unsqueeze(-1)
    error = (weight.view(shape) - stored).double().square().sum(-1)
    size = weight.view(shape).double().square().sum(-1)
    relative = torch.where(size > 0, error / size, torch.zeros_like(error)).flatten()
    worst = int(relative.argmax()) if bool((relative > 0).any()) else -1
    unusable = grid.statistics.num_unusable
    return Statistics(float(error.sum()), float(size.sum()), float(relative[worst]) if worst >= 0 else 0.0, worst, unusable)
