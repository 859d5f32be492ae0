"""ggml's block formats to float32. Each function takes blocks as bytes [blocks, bytes per block] and returns [blocks, elements].

Byte layouts are those of ggml-common.h (block_q4_0 ... block_q6_K); the scale is fp16 and comes first unless noted. The order
of operations is that of ggml's reference: float32 throughout, scale times code first, then the offset.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from windlass.errors import BadInput


def _half(blocks: Tensor, start: int) -> Tensor:
    """The fp16 at byte `start` of every block, [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Low nibbles of all bytes, then high nibbles: ggml's order of 2n codes in n bytes."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """Bit j of the little-endian 32-bit word at `start` is bit 4 of code j."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (blocks[:, start : start + 4, None] >> shifts & 1).flatten(1) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    """scale, 16 bytes of nibbles; value = scale * (code - 8)"""
    codes = _nibbles(blocks[:, 2:]).to(torch.int8) - 8
    return codes.float().mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    """scale, minimum, 16 bytes of nibbles; value = scale * code + minimum"""
    return _nibbles(blocks[:, 4:]).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    """scale, 4 bytes of fifth bits, 16 of nibbles; value = scale * (code - 16)"""
    codes = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).to(torch.int8) - 16
    return codes.float().mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    """scale, minimum, 4 bytes of fifth bits, 16 of nibbles; value = scale * code + minimum"""
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return codes.float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    """scale, 32 signed bytes"""
    return blocks[:, 2:].contiguous().view(torch.int8).float().mul_(_half(blocks, 0))


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight 6-bit scales and eight 6-bit minimums in 12 bytes: the first four of each lie in the low six bits of bytes 0..3
    and 4..7; the others have their low four bits in bytes 8..11 and their high two on top of the first eight bytes."""
    low, high, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([low & 63, rest & 15 | low >> 6 << 4], dim=-1)
    minimums = torch.cat([high & 63, rest >> 4 | high >> 6 << 4], dim=-1)
    return scales, minimums


def _k_values(blocks: Tensor, codes: Tensor) -> Tensor:
    """Eight groups of 32: value = (scale * group scale) * code - minimum * group minimum. `codes` is [blocks, 8, 32]."""
    scales, minimums = _k_scales(blocks[:, 4:16])
    group_scale = _half(blocks, 0) * scales
    group_minimum = _half(blocks, 2) * minimums
    return codes.float().mul_(group_scale[:, :, None]).sub_(group_minimum[:, :, None]).flatten(1)


def _k_nibbles(packed: Tensor) -> Tensor:
    """128 bytes in four runs of 32; each holds two groups, low halves then high halves."""
    return _nibbles(packed.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _q4_k(blocks: Tensor) -> Tensor:
    """scale, minimum, 12 bytes of group scales and minimums, 128 of nibbles"""
    return _k_values(blocks, _k_nibbles(blocks[:, 16:144]))


def _q5_k(blocks: Tensor) -> Tensor:
    """As Q4_K, with 32 bytes of fifth bits before the nibbles: bit g of byte j belongs to code j of group g."""
    groups = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = (blocks[:, None, 16:48] >> groups & 1) << 4
    return _k_values(blocks, _k_nibbles(blocks[:, 48:176]) | fifth)


def _q6_k(blocks: Tensor) -> Tensor:
    """128 bytes of low nibbles, 64 of high pairs of bits, 16 signed group scales, scale; value = (scale * group scale) * (code - 32).

    Each half (128 codes) has 64 bytes of nibbles, low halves then high halves, and 32 bytes of four pairs of bits each.
    """
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3) << 4
    codes = ((low | high).to(torch.int8) - 32).reshape(-1, 16, 16)
    group_scale = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8)
    return codes.float().mul_(group_scale[:, :, None]).flatten(1)


def _plain(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda blocks: blocks.contiguous().view(dtype).float()


DEQUANTIZE: dict[str, Callable[[Tensor], Tensor]] = {
    "F32": _plain(torch.float32),
    "F16": _plain(torch.float16),
    "BF16": _plain(torch.bfloat16),
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def check_type(name: str, type_name: str) -> None:
    if type_name not in DEQUANTIZE:
        raise BadInput(f"tensor {name} has type {type_name}, which is not supported; supported: {', '.join(DEQUANTIZE)}")


def dequantize(type_name: str, blocks: Tensor) -> Tensor:
    """`blocks` is uint8 [blocks, bytes per block]; the result float32 [blocks, elements per block]."""
    return DEQUANTIZE[type_name](blocks)
