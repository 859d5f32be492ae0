"""Proven upper bounds on the quantization error, which tests check `quantize` against. Not typical errors.

The root mean square error of a group (of a row, where there are no groups) is at most `error_bound` times the group's largest
magnitude, plus SMALLEST_ERROR, which only matters for weights near the smallest fp32 numbers.
"""

from __future__ import annotations

from windlass.core.scheme import Stored
from windlass.runtime.kernels.packing.quantize import SAFE, SAFE_RANGE
from windlass.runtime.quant.kind import FP8, INT4, kind_of

SMALLEST_ERROR = 2.0**-127
"""Half the smallest scale."""

_SCALE_ROUNDING = 1 + 2.0**-8
"""bf16 has eight significant bits."""
_ARITHMETIC = 1 + 2.0**-20
"""Everything else is fp32."""


def error_bound(stored: Stored) -> float:
    """Of `quantize` with a search (`fast` or `full`); int4 with `none` is bounded by 1/8."""
    kind = kind_of(stored)
    if kind is FP8:
        # Halfway between the largest codes, which are 32 apart from 256 on.
        return 16 / 448 * _ARITHMETIC
    if kind is not INT4:
        return 0.5 / 127 * _SCALE_ROUNDING * _ARITHMETIC
    # The search takes the least squared error, so no more than that of the safe scale, where every error is half a step.
    steps = SAFE_RANGE / 2 if stored.zero_points else SAFE
    return 0.5 / steps * _SCALE_ROUNDING * _ARITHMETIC
