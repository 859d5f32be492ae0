"""The inner loop of products with ggml's own block types (core/ggml/forms.py), 32 inputs a step.

Codes are small integers, which half precision represents exactly; the scale of their group multiplies the sum in fp32. Rows are as
runtime/kernels/packing/packed_rows.py holds them; `tables` is what codes look up (`lookup`), where they do.
"""

# ruff: noqa: N803, N806 (compile-time constants are in capitals)

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.core.ggml.grids import LENGTHS, grid
from windlass.runtime.kernels.packing.ggml_rows import TABLES


@cache
def lookup(kind: str, device: torch.device) -> Tensor | None:
    """int8: values of 16 codes, or magnitudes of a grid's rows."""
    if kind.upper() in LENGTHS:
        return torch.frombuffer(bytearray(grid(kind.upper())), dtype=torch.int8).to(device)
    return torch.tensor(TABLES[kind], dtype=torch.int8, device=device) if kind in TABLES else None


@triton.jit
def _half(at):
    """The fp16 number at a byte address."""
    bits = tl.load(at).to(tl.uint16) | (tl.load(at + 1).to(tl.uint16) << 8)
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _word(at):
    low = tl.load(at).to(tl.int32) | (tl.load(at + 1).to(tl.int32) << 8)
    return low | (tl.load(at + 2).to(tl.int32) << 16) | (tl.load(at + 3).to(tl.int32) << 24)


@triton.jit
def _signed(byte):
    return byte.to(tl.int8, bitcast=True).to(tl.float32)


@triton.jit
def _nibble_block(words, x, at_rows, tables, KIND: tl.constexpr, TYPE: tl.constexpr):
    """The product of codes (less their zero) with 32 inputs, and the sum of the inputs. `x`: the first input of the block."""
    column = tl.arange(0, 16)
    inputs = column // 4 * 8 + column % 4  # of the low halves of bytes; those of the high halves are 4 further
    stored = tl.load(words[:, None] + column[None, :])
    low, high = (stored & 15).to(tl.int32), (stored >> 4).to(tl.int32)
    if KIND == "q5_k" or KIND == "q5_0" or KIND == "q5_1":
        fifth = tl.load(words[:, None] + 16 + (column % 4)[None, :]).to(tl.int32) >> (column // 4 * 2)[None, :]
        low, high = low | (fifth & 1) << 4, high | (fifth >> 1 & 1) << 4
    if KIND == "q5_0":
        low, high = low - 16, high - 16
    if KIND == "iq4_nl" or KIND == "iq4_xs" or KIND == "mxfp4":
        low, high = tl.load(tables + low).to(tl.int32), tl.load(tables + high).to(tl.int32)
    a = tl.load(x + at_rows[None, :] + inputs[:, None]).to(TYPE)
    b = tl.load(x + at_rows[None, :] + inputs[:, None] + 4).to(TYPE)
    part = tl.dot(high.to(TYPE), b, tl.dot(low.to(TYPE), a, input_precision="ieee"), input_precision="ieee")
    return part, tl.sum(a.to(tl.float32), 0) + tl.sum(b.to(tl.float32), 0)


@triton.jit
def _codes_of_16(words, singles, block, tables, HALF: tl.constexpr, KIND: tl.constexpr):
    """int32 [out, 16]: codes less their zero of half a block."""
    column = tl.arange(0, 16)
    chunk = HALF * 4 + column // 4
    byte = column % 4
    if KIND == "q6_k":
        low = tl.load(words[:, None] + (chunk // 2 * 4 + byte)[None, :]).to(tl.int32) >> (chunk % 2 * 4)[None, :] & 15
        high = tl.load(words[:, None] + (16 + HALF * 4 + byte)[None, :]).to(tl.int32) >> (column // 4 * 2)[None, :] & 3
        codes = (low | high << 4) - 32
    elif KIND == "q2_k" or KIND == "q3_k":
        codes = tl.load(words[:, None] + (HALF * 4 + byte)[None, :]).to(tl.int32) >> (column // 4 * 2)[None, :] & 3
        if KIND == "q3_k":
            third = tl.load(words[:, None] + (8 + byte)[None, :]).to(tl.int32) >> chunk[None, :] & 1
            codes = (codes | third << 2) - 4
    else:
        codes = _grid_codes(words, singles, block, tables, chunk, byte, KIND)
    return codes


@triton.jit
def _grid_codes(words, singles, block, tables, chunk, byte, KIND: tl.constexpr):
    eight = chunk // 2
    sign = chunk % 2 * 4 + byte
    if KIND == "iq2_xs":
        both = tl.load(words[:, None] + (eight * 2)[None, :]).to(tl.int32)
        both = both | (tl.load(words[:, None] + (eight * 2 + 1)[None, :]).to(tl.int32) << 8)
        index = both & 511
        signs = both >> 9 & 127
    else:
        part = chunk if KIND == "iq3_xxs" or KIND == "iq3_s" else eight
        index = tl.load(words[:, None] + part[None, :]).to(tl.int32)
        after = 8 if KIND == "iq3_xxs" or KIND == "iq3_s" else 4
        if KIND == "iq2_s":
            index = index | (tl.load(singles + 8 + block).to(tl.int32)[:, None] >> (eight * 2)[None, :] & 3) << 8
        if KIND == "iq3_s":
            index = index | (tl.load(singles + 4 + block).to(tl.int32)[:, None] >> chunk[None, :] & 1) << 8
        if KIND == "iq2_s" or KIND == "iq3_s":
            signs = tl.load(words[:, None] + (after + eight)[None, :]).to(tl.int32)
        else:
            signs = _word(words + after)[:, None] >> (eight * 7)[None, :] & 127
    if KIND == "iq2_xxs" or KIND == "iq2_xs" or KIND == "iq3_xxs":  # the eighth: the number of negative ones is even
        parity = signs ^ signs >> 4
        parity = parity ^ parity >> 2
        signs = signs | ((parity ^ parity >> 1) & 1) << 7
    if KIND == "iq3_xxs" or KIND == "iq3_s":
        magnitude = tl.load(tables + index * 4 + byte[None, :]).to(tl.int32)
    else:
        magnitude = tl.load(tables + index * 8 + sign[None, :]).to(tl.int32)
    return tl.where(signs >> sign[None, :] & 1 != 0, -magnitude, magnitude)


@triton.jit
def _scale_of_16(words, singles, block, HALF: tl.constexpr, KIND: tl.constexpr):
    """The integer scale, with what the group's scale is to be multiplied with beside."""
    if KIND == "q2_k":
        scale = (tl.load(singles + 2 * block + HALF) & 15).to(tl.float32)
    elif KIND == "q3_k" or KIND == "q6_k":
        scale = _signed(tl.load(singles + 2 * block + HALF))
    elif KIND == "iq2_xs" or KIND == "iq2_s":
        scale = ((tl.load(singles + block).to(tl.int32) >> 4 * HALF & 15) * 2 + 1).to(tl.float32) * 0.125
    elif KIND == "iq3_s":
        scale = ((tl.load(singles + block // 2).to(tl.int32) >> block % 2 * 4 & 15) * 2 + 1).to(tl.float32)
    elif KIND == "iq3_xxs":
        scale = ((_word(words + 8) >> 28 & 15) * 2 + 1).to(tl.float32) * 0.25
    else:
        scale = ((_word(words + 4) >> 28 & 15) * 2 + 1).to(tl.float32) * 0.125
    return scale


@triton.jit
def form_product(
    weight, tables, outs, x, rows, row_codes, first, last,
    KIND: tl.constexpr, TYPE: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """As `product`: fp32 [BLOCK_OUT, BLOCK_ROWS] over the inputs first * 32 .. last * 32."""
    BLOCKS: tl.constexpr = 1 if KIND == "q5_0" or KIND == "q5_1" or KIND == "iq4_nl" or KIND == "mxfp4" else 8
    IS_MINIMUM: tl.constexpr = KIND == "q2_k" or KIND == "q4_k" or KIND == "q5_k" or KIND == "q5_1"
    HALVES: tl.constexpr = 0 if KIND == "mxfp4" else 2 if IS_MINIMUM else 1
    IS_WIDE: tl.constexpr = (
        KIND == "q2_k" or KIND == "q3_k" or KIND == "q4_k" or KIND == "q5_k" or KIND == "q6_k" or KIND == "iq2_s"
    )
    FEW: tl.constexpr = 8 if KIND == "iq4_xs" or KIND == "iq2_xs" else 12 if KIND == "iq3_s" else 1 if KIND == "mxfp4" else 0
    SINGLES: tl.constexpr = 16 if IS_WIDE else FEW
    IS_FIVE: tl.constexpr = KIND == "q5_k" or KIND == "q5_0" or KIND == "q5_1"
    IS_THREE: tl.constexpr = KIND == "q3_k" or KIND == "iq3_xxs" or KIND == "iq3_s"
    IS_NIBBLE: tl.constexpr = IS_FIVE or KIND == "q4_k" or KIND == "iq4_nl" or KIND == "iq4_xs" or KIND == "mxfp4"
    LARGE: tl.constexpr = 24 if KIND == "q6_k" else 20 if IS_FIVE else 16
    BLOCK_BYTES: tl.constexpr = LARGE if IS_NIBBLE or KIND == "q6_k" else 12 if IS_THREE else 8
    BYTES: tl.constexpr = 2 * HALVES + SINGLES + BLOCKS * BLOCK_BYTES
    base = weight + outs.to(tl.int64) * row_codes
    column = tl.arange(0, 16)
    total = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
    for step in range(first, last):
        block = step % BLOCKS
        at = base + step // BLOCKS * BYTES
        singles = at + 2 * HALVES
        words = singles + SINGLES + block * BLOCK_BYTES
        if KIND == "mxfp4":  # half of two to the exponent less 127; the two smallest are subnormal
            exponent = tl.load(singles).to(tl.int32)
            d = tl.where(exponent < 2, 0x00200000 << tl.minimum(exponent, 1), exponent - 1 << 23).to(tl.float32, bitcast=True)
        else:
            d = _half(at)
        if IS_NIBBLE:
            part, sums = _nibble_block(words, x + step * 32, rows, tables, KIND, TYPE)
            if KIND == "q4_k" or KIND == "q5_k":
                d = d * tl.load(singles + block).to(tl.float32)
                total -= (_half(at + 2) * tl.load(singles + 8 + block).to(tl.float32))[:, None] * sums[None, :]
            if KIND == "iq4_xs":
                d = d * _signed(tl.load(singles + block))
            if KIND == "q5_1":
                total += _half(at + 2)[:, None] * sums[None, :]
            total += part * d[:, None]
        else:
            for HALF in tl.static_range(2):
                a = tl.load(x + rows[None, :] + (step * 32 + HALF * 16 + column)[:, None]).to(TYPE)
                codes = _codes_of_16(words, singles, block, tables, HALF, KIND)
                part = tl.dot(codes.to(TYPE), a, input_precision="ieee")
                total += part * (d * _scale_of_16(words, singles, block, HALF, KIND))[:, None]
                if KIND == "q2_k":
                    minimum = _half(at + 2) * (tl.load(singles + 2 * block + HALF) >> 4).to(tl.float32)
                    total -= minimum[:, None] * tl.sum(a.to(tl.float32), 0)[None, :]
    return total
