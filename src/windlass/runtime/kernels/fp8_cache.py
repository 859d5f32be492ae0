"""Keys and values in 8 bits: e4m3 codes and a power of two for each token and head. The reference of every kernel that stores or reads them.

The power is the smallest by which the largest magnitude fits e4m3 (448). It costs one byte, and no product with it rounds: all implementations
store the same bits, and what is read back is exact in bf16 (4 significant bits). Knows no cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0
BIAS = 127
"""The byte of a power of two is its exponent in fp32."""
LEAST, MOST = BIAS - 40, BIAS + 40
"""Powers beyond these are not used: magnitudes below 4e-10 become zero, above 4.9e14 the largest."""
CARRY = 0x1FFFFF
"""Added to the bits of a magnitude, it moves mantissas above 1.75 (448 = 1.75 * 2^8) to the next exponent."""


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., dim] -> float8_e4m3fn of the same shape, and uint8 [...]."""
    wide = x.float()
    bits = wide.abs().amax(-1).view(torch.int32)
    scales = (((bits + CARRY) >> 23) - 8).clamp(LEAST, MOST)
    codes = (wide * power(2 * BIAS - scales)[..., None]).clamp(-LARGEST, LARGEST)
    return codes.to(torch.float8_e4m3fn), scales.to(torch.uint8)


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Codes [..., dim] and scales [...]."""
    return (codes.float() * power(scales)[..., None]).to(dtype)


def power(scales: Tensor) -> Tensor:
    """fp32 of the bytes of powers; 0 of a cache that nothing was written to."""
    return (scales.to(torch.int32) << 23).view(torch.float32)
