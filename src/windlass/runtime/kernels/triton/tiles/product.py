"""The inner loop of all matmuls with weights: a tile of weights is dequantized in registers and multiplied with a tile of activations.

Weights are the left operand, so that few rows of activations waste little of the tensor cores, and so that dequantized weights go from
registers into the product. Codes are multiplied as small integers, which half precision represents exactly; the scale of their group
multiplies the sum. What a code stands for: runtime/kernels/packing/packed_rows.py.
"""

# ruff: noqa: N803, N806 (compile-time constants are in capitals)

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.runtime.kernels.packing.packed_rows import PackedRows
from windlass.runtime.kernels.triton.device import interpreted
from windlass.runtime.kernels.triton.tiles.forms import form_product, lookup
from windlass.runtime.kernels.triton.tiles.types import is_float, products_in

# Four bytes to eight numbers: each code becomes the low byte of 128 + code in bf16 (0x43..) or of 1024 + code in fp16 (0x64..), from
# which 136 or 1032 is taken. Both steps are exact. One multiply-add does two numbers at once.
_NIBBLES = """{{
    .reg .b32 low, high, magic, one, less;
    and.b32 low, $4, 0x0F0F0F0F;
    shr.u32 high, $4, 4;
    and.b32 high, high, 0x0F0F0F0F;
    mov.b32 magic, {magic};
    mov.b32 one, {one};
    mov.b32 less, {less};
    prmt.b32 $0, low, magic, 0x5140;
    prmt.b32 $1, low, magic, 0x7362;
    prmt.b32 $2, high, magic, 0x5140;
    prmt.b32 $3, high, magic, 0x7362;
    fma.rn.{kind} $0, $0, one, less;
    fma.rn.{kind} $1, $1, one, less;
    fma.rn.{kind} $2, $2, one, less;
    fma.rn.{kind} $3, $3, one, less;
}}"""
NIBBLES_BF16 = tl.constexpr(_NIBBLES.format(kind="bf16x2", magic="0x43434343", one="0x3F803F80", less="0xC308C308"))
NIBBLES_FP16 = tl.constexpr(_NIBBLES.format(kind="f16x2", magic="0x64646464", one="0x3C003C00", less="0xE408E408"))

# Four bytes of e4m3 to four numbers: sign and magnitude go to where the wider type has them, which divides by a power of two (the
# difference of the exponents' biases, 2^-120 or 2^-8; subnormal numbers included); a multiplication brings it back.
_EIGHTS = """{{
    .reg .b32 even, odd, sign, up, zero;
    prmt.b32 even, $2, 0, 0x1404;
    prmt.b32 odd, $2, 0, 0x3424;
    mov.b32 up, {up};
    mov.b32 zero, 0x80008000;
    and.b32 sign, even, 0x80008000;
    and.b32 even, even, 0x7F007F00;
    shr.u32 even, even, {shift};
    or.b32 even, even, sign;
    and.b32 sign, odd, 0x80008000;
    and.b32 odd, odd, 0x7F007F00;
    shr.u32 odd, odd, {shift};
    or.b32 odd, odd, sign;
    fma.rn.{kind} $0, even, up, zero;
    fma.rn.{kind} $1, odd, up, zero;
}}"""
EIGHTS_BF16 = tl.constexpr(_EIGHTS.format(kind="bf16x2", up="0x7B807B80", shift=4))
EIGHTS_FP16 = tl.constexpr(_EIGHTS.format(kind="f16x2", up="0x5C005C00", shift=1))


@triton.jit
def nibbles(codes, TYPE: tl.constexpr, ASM: tl.constexpr):
    """Low and high nibbles of bytes, minus 8."""
    if ASM and tl.bfloat16 == TYPE:
        low, high = tl.inline_asm_elementwise(NIBBLES_BF16, "=r,=r,=r,=r,r", [codes], (tl.bfloat16, tl.bfloat16), True, 4)
    elif ASM and tl.float16 == TYPE:
        low, high = tl.inline_asm_elementwise(NIBBLES_FP16, "=r,=r,=r,=r,r", [codes], (tl.float16, tl.float16), True, 4)
    else:
        low = ((codes & 15).to(tl.int8) - 8).to(TYPE)
        high = ((codes >> 4).to(tl.int8) - 8).to(TYPE)
    return low, high


@triton.jit
def eights(codes, TYPE: tl.constexpr, ASM: tl.constexpr):
    """e4m3 to TYPE."""
    if ASM and tl.bfloat16 == TYPE:
        numbers = tl.inline_asm_elementwise(EIGHTS_BF16, "=r,=r,r", [codes], tl.bfloat16, True, 4)
    elif ASM and tl.float16 == TYPE:
        numbers = tl.inline_asm_elementwise(EIGHTS_FP16, "=r,=r,r", [codes], tl.float16, True, 4)
    else:
        placed = ((codes & 128).to(tl.uint16) << 8) | ((codes & 127).to(tl.uint16) << 7)
        numbers = (placed.to(tl.float16, bitcast=True).to(tl.float32) * 256).to(TYPE)
    return numbers


@triton.jit
def product(
    weight, scale, offset, outs, x, rows, num_in, row_codes, row_groups, first, last,
    KIND: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, TYPE: tl.constexpr, ASM: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """fp32 [BLOCK_OUT, BLOCK_ROWS]: weight[outs] times rows of x, over the inputs first * BLOCK_IN .. last * BLOCK_IN.

    `outs` are rows of the matrix and `rows` offsets of rows of x, all of them valid: callers clamp beyond the end.
    """
    if GROUP == 0:  # one of ggml's own types
        return form_product(weight, offset, outs, x, rows, row_codes, first, last, KIND, TYPE, BLOCK_OUT, BLOCK_ROWS)
    HALF: tl.constexpr = BLOCK_IN // 2
    inputs = tl.arange(0, BLOCK_IN)
    halves = tl.arange(0, HALF)
    apart = halves // 16 * 32 + halves % 16  # inputs whose codes are low halves of bytes; those of the high halves are 16 further
    outs = outs.to(tl.int64)
    total = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
    SHIFTED: tl.constexpr = KIND == "int4_zeros" or KIND == "int4_minima"
    numbers = outs * row_groups
    if (
        KIND != "plain"
    ):  # scales are loaded a step ahead: they are too small for asynchronous copies, which hide the wait for the rest
        next_scale = tl.load(scale + numbers + first * BLOCK_IN // GROUP)
        if SHIFTED:
            next_offset = tl.load(offset + numbers + first * BLOCK_IN // GROUP)
    for step in range(first, last):
        start = step * BLOCK_IN
        if KIND == "plain":
            at = start + inputs
            w_at = weight + outs[:, None] * row_codes + at[None, :]
            x_at = x + rows[None, :] + at[:, None]
            if EVEN:
                w = tl.load(w_at)
                a = tl.load(x_at)
            else:
                w = tl.load(w_at, mask=at[None, :] < num_in, other=0)
                a = tl.load(x_at, mask=at[:, None] < num_in, other=0)
            total = tl.dot(w.to(TYPE), a.to(TYPE), total, input_precision="ieee")
        else:
            s = next_scale.to(tl.float32)
            group = tl.minimum(step + 1, last - 1) * BLOCK_IN // GROUP
            next_scale = tl.load(scale + numbers + group)
            if KIND == "int8" or KIND == "fp8":
                codes = tl.load(weight + outs[:, None] * row_codes + (start + inputs)[None, :])
                a = tl.load(x + rows[None, :] + (start + inputs)[:, None]).to(TYPE)
                if KIND == "fp8":
                    w = eights(codes, TYPE, ASM)
                else:
                    w = (codes ^ 128).to(tl.int8, bitcast=True).to(TYPE)
                total += tl.dot(w, a, input_precision="ieee") * s[:, None]
            else:
                codes = tl.load(weight + outs[:, None] * row_codes + (start // 2 + halves)[None, :])
                a = tl.load(x + rows[None, :] + (start + apart)[:, None]).to(TYPE)
                b = tl.load(x + rows[None, :] + (start + apart + 16)[:, None]).to(TYPE)
                low, high = nibbles(codes, TYPE, ASM)
                part = tl.dot(high, b, tl.dot(low, a, input_precision="ieee"), input_precision="ieee")
                total += part * s[:, None]
                if SHIFTED:  # codes were taken less 8
                    o = next_offset.to(tl.float32)
                    next_offset = tl.load(offset + numbers + group)
                    if KIND == "int4_zeros":
                        o = (8 - o) * s
                    else:
                        o = 8 * s + o
                    sums = tl.sum(a.to(tl.float32), 0) + tl.sum(b.to(tl.float32), 0)
                    total += o[:, None] * sums[None, :]
    return total


@dataclass(frozen=True)
class Tiling:
    block_out: int
    block_rows: int
    block_in: int
    num_warps: int
    num_stages: int
    programs: int
    """Programs per multiprocessor that keep it busy."""


WIDE_IN = 128
FORM_IN = 32
"""Inputs of a step with ggml's own types."""
TILINGS = (
    Tiling(block_out=64, block_rows=16, block_in=WIDE_IN, num_warps=4, num_stages=4, programs=4),
    Tiling(block_out=64, block_rows=32, block_in=WIDE_IN, num_warps=4, num_stages=4, programs=3),
    Tiling(block_out=64, block_rows=64, block_in=WIDE_IN, num_warps=4, num_stages=3, programs=2),
    Tiling(block_out=128, block_rows=128, block_in=64, num_warps=8, num_stages=3, programs=1),
)
"""By the number of rows that share a tile of weights: the smallest that holds them, or the last. All fit the 99 KB of shared memory of
smaller Ampere and Ada GPUs."""


@dataclass(frozen=True)
class TritonMatrix:
    """A plain or packed weight, as arguments of `product`."""

    kind: str
    weight: Tensor
    scale: Tensor | None
    offset: Tensor | None
    num_out: int
    num_in: int
    row_codes: int
    group: int
    """0: one of ggml's own types, whose scales are among the codes; `offset` is then what codes look up."""

    @property
    def num_groups(self) -> int:
        return self.num_in // self.group if self.group else 0

    def tiling(self, rows: int, dtype: torch.dtype) -> Tiling:
        """fp32 does not use tensor cores: small tiles."""
        fitting = TILINGS[:2] if self.product_type(dtype) == torch.float32 else TILINGS
        chosen = next((tiling for tiling in fitting if tiling.block_rows >= rows), fitting[-1])
        if self.kind == "plain":
            return replace(chosen, block_in=64)
        if not self.group:
            return replace(chosen, block_in=FORM_IN, num_stages=chosen.num_stages)
        shared = self.group & -self.group  # the largest power of two in it
        block_in = min(chosen.block_in, shared)
        # Small steps have fewer bytes in flight: more pipeline stages.
        return replace(chosen, block_in=block_in, num_stages=chosen.num_stages * (2 if block_in < 64 else 1))

    def product_type(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the factors, for activations of `dtype`."""
        return torch.promote_types(dtype, self.weight.dtype) if self.kind == "plain" else dtype

    def constants(self, tiling: Tiling, dtype: torch.dtype) -> dict[str, object]:
        return {
            "KIND": self.kind,
            "GROUP": self.group,
            "EVEN": self.num_in % tiling.block_in == 0,
            "TYPE": products_in(self.product_type(dtype)),
            "ASM": not interpreted(),
            "BLOCK_OUT": tiling.block_out,
            "BLOCK_ROWS": tiling.block_rows,
            "BLOCK_IN": tiling.block_in,
            "num_warps": tiling.num_warps,
            "num_stages": tiling.num_stages,
        }


def matrix(weight: Tensor | PackedRows) -> TritonMatrix | None:
    """None: not supported."""
    if isinstance(weight, PackedRows) and weight.form is not None:
        tables = lookup(weight.kind, weight.device)
        return TritonMatrix(weight.kind, weight.data, weight.scale, tables, *weight.shape, weight.data.shape[2], 0)
    if isinstance(weight, PackedRows):
        return TritonMatrix(
            weight.kind, weight.data, weight.scale, weight.offset, *weight.shape, weight.data.shape[2], weight.group
        )
    if not isinstance(weight, Tensor) or not is_float(weight) or not weight.is_contiguous():
        return None
    return TritonMatrix("plain", weight, None, None, *weight.shape[-2:], weight.shape[-1], weight.shape[-1])


def num_slices(programs: int, wanted: int, steps: int) -> int:
    """Split-K: slices of the inputs that fill the device; at most 16, of at least four steps each."""
    return max(1, min(wanted // programs, steps // 4, 16))
