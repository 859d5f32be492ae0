"""Keys and values in e4m3 with a power of two each (runtime/kernels/fp8_cache.py), inlined in other kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from windlass.runtime.kernels import fp8_cache

TWICE = tl.constexpr(2 * fp8_cache.BIAS)
LARGEST = tl.constexpr(fp8_cache.LARGEST)
LEAST = tl.constexpr(fp8_cache.LEAST)
MOST = tl.constexpr(fp8_cache.MOST)
CARRY = tl.constexpr(fp8_cache.CARRY)


@triton.jit
def scale_for(largest):
    """The byte of the power of two by which magnitudes up to `largest` (fp32) fit."""
    exponent = ((largest.to(tl.int32, bitcast=True) + CARRY) >> 23) - 8
    return tl.minimum(tl.maximum(exponent, LEAST), MOST)


@triton.jit
def power(scale):
    """fp32 of the byte of a power."""
    return (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def coded(numbers, scale):
    """e4m3 of fp32 numbers."""
    fitting = numbers * power(scale * -1 + TWICE)  # in this order for the interpreter
    return tl.minimum(tl.maximum(fitting, -LARGEST), LARGEST).to(tl.float8e4nv)
