"""A weight and how it is to be stored, to packed codes. Knows neither files nor threads: callers give it blocks of rows."""

from __future__ import annotations

from torch import Tensor

from windlass.core.scheme import Stored
from windlass.errors import BadInput
from windlass.kernels.packing import calibrated
from windlass.kernels.packing import quantize as kernels
from windlass.kernels.packing.calibrated import Inputs
from windlass.kernels.packing.statistics import Statistics
from windlass.quant.kind import FP8, INT4, kind_of
from windlass.quant.packed import Packed


def quantize_rows(
    weight: Tensor, stored: Stored, search: str = kernels.DEFAULT_SEARCH, inputs: Inputs | None = None
) -> tuple[Packed, Statistics]:
    """Rows [n, in] of a matrix. Blocks give the same bytes as the whole, if they start on `stored.quantum(0)` rows.

    `inputs`: what is known of them; int4 codes then keep the products, not the weights.
    The caller must look at `num_unusable`: rows with NaN or Inf come out as zeros.
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
    return Packed(stored, done.codes, done.scale, done.zero_point, shape), done.statistics


def quantize(weight: Tensor, stored: Stored, search: str = kernels.DEFAULT_SEARCH) -> Packed:
    """The whole matrix; refuses weights that are not numbers."""
    packed, statistics = quantize_rows(weight, stored, search)
    if statistics.num_unusable:
        raise BadInput(
            f"{statistics.num_unusable} of {weight.numel()} weights are NaN, infinite or beyond 2^126: a damaged source"
        )
    return packed
