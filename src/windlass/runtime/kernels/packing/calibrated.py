"""Calibrated int4 quantization (GPTQ, arXiv 2210.17323): the error of one input is compensated by the inputs after it.

Rounding weight by weight minimises the error of the weights. What matters is the error of their products with real inputs x, whose
second moments H = sum of x x^T are measured first. Inputs are rounded one after the other, the largest moment first, and the error of each
is spread over those not yet rounded so that the products change least. With U the upper Cholesky factor of H^-1, rounding input j with
error e adds -e / U_jj * U_jk to every later weight k. Scales are found before, by the search of plain rounding with errors weighted by
what later inputs cannot compensate. Rows are independent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.runtime.kernels.packing import quantize
from windlass.runtime.kernels.packing.quantize import Quantized
from windlass.runtime.kernels.packing.quantize_reference import weighted_grid
from windlass.runtime.kernels.packing.statistics import Statistics

DAMPING = 0.01
"""Fraction of the mean second moment that is added to the diagonal, as published: rare inputs must not get unbounded corrections."""
BLOCK = 64
"""Inputs per block: errors are spread within a block at once, and beyond it in one product."""


@dataclass(frozen=True)
class CalibrationInputs:
    """Statistics of a matrix's inputs."""

    order: Tensor
    """By second moment, largest first."""
    factor: Tensor
    """Upper Cholesky factor of the inverse moments, rows and columns in that order."""

    @property
    def importance(self) -> Tensor:
        """Each input's second moment that later inputs cannot compensate; mean 1."""
        found = torch.empty_like(self.factor[0])
        found[self.order] = self.factor.diagonal() ** -2
        return found / found.mean()


def inputs_from(moments: Tensor, damping: float = DAMPING) -> CalibrationInputs:
    """From second moments [in, in]. Inputs that were always zero count as independent."""
    seen = moments.diagonal().double()
    order = seen.argsort(descending=True, stable=True)
    mean = seen.mean() if bool(seen.any()) else torch.ones((), dtype=torch.float64)
    damped = moments.double()[order][:, order] + torch.diag(torch.where(seen > 0, damping * mean, mean)[order])
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return CalibrationInputs(order, torch.linalg.cholesky(inverse, upper=True).float())


def int4(weight: Tensor, group: int, inputs: CalibrationInputs, *, zero_points: bool = False) -> Quantized:
    """As quantize.int4, with error compensation."""
    rows, width = weight.shape
    factors = [1 / over for over in (quantize.ASYMMETRIC if zero_points else quantize.SYMMETRIC)[quantize.DEFAULT_SEARCH]]
    scales, lows, num_unusable = weighted_grid(weight, group, factors, zero_points, inputs.importance)
    # Transposed: an input is rounded at once for all outputs, from contiguous memory.
    groups = inputs.order // group
    scale, low = scales.T[groups], lows.T[groups]
    left = weight.float().T[inputs.order]
    chosen = torch.empty(width, rows, dtype=torch.uint8)
    for start in range(0, width, BLOCK):
        span = slice(start, min(start + BLOCK, width))
        errors = _round(left[span], scale[span], low[span], inputs.factor[span, span], chosen[span])
        left[span.stop :] -= inputs.factor[span, span.stop :].T @ errors
    codes = torch.empty(rows, width, dtype=torch.uint8)
    codes[:, inputs.order] = chosen.T
    packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).contiguous().view(torch.int32)
    zeros = quantize.pack_zero_points((-8.0 - lows).to(torch.int8)) if zero_points else None
    found = _statistics(weight.float(), codes, scales, lows, num_unusable)
    return Quantized(packed, scales.to(torch.bfloat16), zeros, found)


def _round(left: Tensor, scale: Tensor, low: Tensor, factor: Tensor, codes: Tensor) -> Tensor:
    """Rounds inputs one after the other into `codes`; returns each error over its diagonal."""
    errors = torch.empty_like(left)
    for index in range(left.shape[0]):
        code = torch.clamp_(torch.round(left[index] / scale[index]).sub_(low[index]), 0, 15)
        codes[index] = code.to(torch.uint8)
        errors[index] = (left[index] - (code + low[index]) * scale[index]) / factor[index, index]
        left[index + 1 :].addr_(factor[index, index + 1 :], errors[index], alpha=-1)
    return errors


def _statistics(weight: Tensor, codes: Tensor, scales: Tensor, lows: Tensor, num_unusable: int) -> Statistics:
    """Errors of the weights, for comparison, though they are not what was minimised."""
    shape = (*scales.shape, weight.shape[1] // scales.shape[1])
    stored = (codes.view(shape).float() + lows.unsqueeze(-1)) * scales.unsqueeze(-1)
    error = (weight.view(shape) - stored).double().square().sum(-1)
    size = weight.view(shape).double().square().sum(-1)
    relative = torch.where(size > 0, error / size, torch.zeros_like(error)).flatten()
    worst = int(relative.argmax()) if bool((relative > 0).any()) else -1
    return Statistics(float(error.sum()), float(size.sum()), float(relative[worst]) if worst >= 0 else 0.0, worst, num_unusable)
