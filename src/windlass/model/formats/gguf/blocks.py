"""ggml's block formats to float32. Each function takes blocks as bytes [blocks, bytes per block] and returns [blocks, elements].

Byte layouts are those of ggml-common.h (block_q4_0 ... block_q6_K); the scale is fp16 and comes first unless noted. The order
of operations is that of ggml's reference: float32 throughout, scale times code first, then the offset.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from windlass.core.ggml.forms import FP4_DOUBLED, IQ4_VALUES
from windlass.core.ggml.grids import LENGTHS, grid
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


def _q2_k(blocks: Tensor) -> Tensor:
    """16 bytes of group scales (low halves) and minimums (high), 64 of pairs of bits, scale, minimum; groups of 16."""
    scales, minimums = blocks[:, :16] & 15, blocks[:, :16] >> 4
    codes = _pairs_of_bits(blocks[:, 16:80]).view(-1, 16, 16).float()
    codes.mul_((_half(blocks, 80) * scales)[:, :, None])
    return codes.sub_((_half(blocks, 82) * minimums)[:, :, None]).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    """32 bytes of third bits (0 takes 4 away), 64 of pairs of bits, 12 of 6-bit group scales plus 32, scale; groups of 16."""
    thirds = (blocks[:, None, :32] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1).flatten(1)
    codes = (_pairs_of_bits(blocks[:, 32:96]) + 4 * thirds).to(torch.int8) - 4
    low = _nibbles(blocks[:, 96:104])
    high = (blocks[:, None, 104:108] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None] & 3).flatten(1)
    scales = (low | high << 4).to(torch.int8) - 32
    return codes.view(-1, 16, 16).float().mul_((_half(blocks, 108) * scales)[:, :, None]).flatten(1)


def _pairs_of_bits(packed: Tensor) -> Tensor:
    """Each run of 32 bytes holds 128 codes: the lowest pairs of bits of all bytes first."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    return (packed.reshape(len(packed), -1, 1, 32) >> shifts & 3).flatten(1)


# --- codes that are indices of a table


def _looked_up(codes: Tensor, table: tuple[int, ...]) -> Tensor:
    return torch.tensor(table, dtype=torch.float32)[codes.long()]


def _iq4_nl(blocks: Tensor) -> Tensor:
    """scale, 16 bytes of nibbles"""
    return _looked_up(_nibbles(blocks[:, 2:]), IQ4_VALUES).mul_(_half(blocks, 0))


def _iq4_xs(blocks: Tensor) -> Tensor:
    """scale, 2 bytes of high pairs of bits and 4 of low nibbles of group scales plus 32, then groups of 32 as in IQ4_NL"""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)
    high = (blocks[:, 2:4, None] >> shifts & 3).flatten(1)
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).flatten(1)
    scales = (low | high << 4).to(torch.int8) - 32
    values = _looked_up(_nibbles(blocks[:, 8:].reshape(-1, 8, 16)), IQ4_VALUES)
    return values.mul_((_half(blocks, 0) * scales)[:, :, None]).flatten(1)


def _mxfp4(blocks: Tensor) -> Tensor:
    """exponent, 16 bytes of nibbles; half of two to the exponent less 127"""
    scale = torch.ldexp(torch.ones(len(blocks), 1), blocks[:, :1].int() - 128)
    return _looked_up(_nibbles(blocks[:, 1:]), FP4_DOUBLED).mul_(scale)


# --- codes that are indices of a grid, with signs

_POWERS = tuple(range(8))


def _words(blocks: Tensor, start: int, stop: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return (
        blocks[:, start:stop].flatten().clone().view(dtype).view(len(blocks), -1)
    )  # of one block the slice may lie at an odd address


def _magnitudes(name: str, index: Tensor) -> Tensor:
    table = torch.frombuffer(bytearray(grid(name)), dtype=torch.uint8).view(-1, LENGTHS[name])
    return table[index.long()].flatten(1).float()


def _signed(magnitudes: Tensor, signs: Tensor, db: Tensor) -> Tensor:
    """`signs`: a byte for 8 numbers. `db`: the scale of every group, [blocks, groups]."""
    negative = (signs[..., None] >> torch.tensor(_POWERS, dtype=torch.uint8) & 1).flatten(1).bool()
    values = torch.where(negative, -magnitudes, magnitudes).view(*db.shape, -1)
    return (values * db[:, :, None]).flatten(1)


def _seven_signs(index: Tensor) -> Tensor:
    """Seven signs are stored; the number of negative ones is even."""
    bits = index & 127
    parity = sum((bits >> place & 1 for place in range(7)), torch.zeros_like(bits)) & 1
    return (bits | parity << 7).to(torch.uint8)


def _nibble_scales(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def _iq2_xxs(blocks: Tensor) -> Tensor:
    """scale; of every 32: 4 bytes of indices, a word of four times 7 signs and a 4-bit scale"""
    words = _words(blocks, 2, 66).view(-1, 8, 2)
    index = words[..., 0].contiguous().view(torch.uint8).view(-1, 32)
    signs = _seven_signs(words[..., 1:] >> torch.tensor([0, 7, 14, 21])).flatten(1)
    db = _half(blocks, 0) * (0.5 + (words[..., 1] >> 28 & 15)) * 0.25
    return _signed(_magnitudes("IQ2_XXS", index), signs, db)


def _iq2_xs(blocks: Tensor) -> Tensor:
    """scale, 32 words of 9 bits of index and 7 signs, 8 bytes of 4-bit scales of 16"""
    words = _words(blocks, 2, 66, torch.int16).int() & 0xFFFF
    db = _half(blocks, 0) * (0.5 + _nibble_scales(blocks[:, 66:])) * 0.25
    return _signed(_magnitudes("IQ2_XS", words & 511), _seven_signs(words >> 9), db)


def _iq2_s(blocks: Tensor) -> Tensor:
    """scale, 32 bytes of indices, 32 of signs, 8 of high pairs of bits of the indices, 8 of 4-bit scales of 16"""
    high = (blocks[:, 66:74, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3).flatten(1)
    db = _half(blocks, 0) * (0.5 + _nibble_scales(blocks[:, 74:])) * 0.25
    return _signed(_magnitudes("IQ2_S", blocks[:, 2:34].int() | high.int() << 8), blocks[:, 34:66], db)


def _iq3_xxs(blocks: Tensor) -> Tensor:
    """scale, 64 bytes of indices, 8 words of four times 7 signs and a 4-bit scale"""
    words = _words(blocks, 66, 98)
    signs = _seven_signs(words[..., None] >> torch.tensor([0, 7, 14, 21])).flatten(1)
    db = _half(blocks, 0) * (0.5 + (words >> 28 & 15)) * 0.5
    return _signed(_magnitudes("IQ3_XXS", blocks[:, 2:66]), signs, db)


def _iq3_s(blocks: Tensor) -> Tensor:
    """scale, 64 bytes of indices, 8 of their ninth bits, 32 of signs, 4 of 4-bit scales of 32"""
    ninth = (blocks[:, 66:74, None] >> torch.tensor(_POWERS, dtype=torch.uint8) & 1).flatten(1)
    db = _half(blocks, 0) * (1 + 2 * _nibble_scales(blocks[:, 106:]))
    return _signed(_magnitudes("IQ3_S", blocks[:, 2:66].int() | ninth.int() << 8), blocks[:, 74:106], db)


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
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
}


def check_type(name: str, type_name: str) -> None:
    if type_name not in DEQUANTIZE:
        raise BadInput(f"tensor {name} has type {type_name}, which is not supported; supported: {', '.join(DEQUANTIZE)}")


def dequantize(type_name: str, blocks: Tensor) -> Tensor:
    """`blocks` is uint8 [blocks, bytes per block]; the result float32 [blocks, elements per block]."""
    return DEQUANTIZE[type_name](blocks)
