"""Quantizes a weight to a storage format. Knows neither files nor threads: callers pass blocks of rows."""

from __future__ import annotations

from torch import Tensor

from windlass.core.scheme import Stored
from windlass.errors import BadInput
from windlass.runtime.kernels.packing import calibrated
from windlass.runtime.kernels.packing import quantize as kernels
from windlass.runtime.kernels.packing.calibrated import CalibrationInputs
from windlass.runtime.kernels.packing.statistics import Statistics
from windlass.runtime.quant.kind import FP8, INT4, kind_of
from windlass.runtime.quant.packed import PackedMatrix


def quantize_rows(
    weight: Tensor, stored: Stored, search: str = kernels.DEFAULT_SEARCH, inputs: CalibrationInputs | None = None
) -> tuple[PackedMatrix, Statistics]:
    """Rows [n, in] of a matrix. Blocks give the same bytes as the whole, if they start on `stored.quantum(0)` rows.

    `inputs`: calibration statistics; int4 then minimizes the error of products, not of weights.
    The caller must check `num_unusable`: groups with NaN or Inf become zeros.
    """
    kind = kind_of(stored)
    if kind is INT4 and inputs is not None:
        done = calibrated.int4(weight, stored.group or 0, inputs, zero_points=stored.zero_points)
    elif kind is INT4:
        done = kernels.int4(weight, stored.group or 0, zero_points=stored.zero_points, search=search)
    elif kind is FP8:
        done = kernels.fp8(weight)
    else:
        done = kernels.int8(weight, stored.group)
    shape = (weight.shape[0], weight.shape[1])
    return PackedMatrix(stored, done.codes, done.scale, done.zero_point, shape), done.statistics


def quantize(weight: Tensor, stored: Stored, search: str = kernels.DEFAULT_SEARCH) -> PackedMatrix:
    """The whole matrix; raises BadInput for NaN or infinite weights."""
    packed, statistics = quantize_rows(weight, stored, search)
    if statistics.num_unusable:
        raise BadInput(
            f"{statistics.num_unusable} of {weight.numel()} weights are NaN, infinite or beyond 2^126; "
            "the source is probably damaged, download it again"
        )
    return packed
