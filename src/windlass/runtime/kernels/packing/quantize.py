"""Quantization of weights to int4, int8 and fp8 codes, with scales and error statistics. Knows neither files nor models.

The output has the layout of compressed-tensors. The compiled loop and `quantize_reference` give identical bytes; ctypes releases the GIL,
so a caller that wants more than one core runs blocks of rows in its own threads.

Scale search of int4. A scale of the largest magnitude over 7 (or 7.5) wastes codes. Here:
1. The end with the larger magnitude gets code -8, which has no positive counterpart, so scales may be negative
   (as GGML's Q4_0 has it: https://github.com/ggml-org/llama.cpp, `quantize_row_q4_0_ref`).
2. A few scales around it are tried, each as the bf16 value that will be stored, and the one with the least squared error is kept.
3. Given those codes, the best scale follows by least squares; it replaces the other if its error is less.
Against the largest magnitude over 7.5, groups of 128: Gaussian weights 11.1 -> 9.7 % relative RMS error, Laplace 15.2 -> 13.2,
Student's t with 4 degrees 18.3 -> 15.8; all within 0.3 % of an exhaustive search. int8 gains nothing from it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.errors import BadInput
from windlass.runtime.kernels import build
from windlass.runtime.kernels.packing import quantize_reference
from windlass.runtime.kernels.packing.statistics import Statistics

GROUPS = (32, 64, 128)
INPUTS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}

# The largest magnitude (with zero points: the range) over the scale; the first is used where nothing is searched. Chosen
# by descent on Gaussian, Laplace and t4 weights in groups of 128 and 32. SAFE is among them: with it nothing is clipped by more
# than half a step, so the search is never worse than plain rounding (see quant.bounds).
SAFE = 7.4
SAFE_RANGE = 14.2
SYMMETRIC = {
    "none": (8.0,),
    "fast": (8.0, SAFE, 8.55, 9.275),
    "full": (8.0, SAFE, 7.0, 8.3, 8.65, 9.0, 9.4, 9.825),
}
ASYMMETRIC = {
    "none": (15.0,),
    "fast": (15.0, SAFE_RANGE, 15.8, 16.6),
    "full": (15.0, SAFE_RANGE, 13.15, 15.5, 16.0, 16.44, 16.95, 17.47),
}
DEFAULT_SEARCH = "full"


@dataclass(frozen=True)
class Quantized:
    """Rows [n, k] as codes, scales [n, groups] and, perhaps, zero points [ceil(n / 8), groups] packed along n."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    statistics: Statistics


class _Statistics(ctypes.Structure):
    _fields_ = [
        ("squared_error", ctypes.c_double),
        ("squared_weight", ctypes.c_double),
        ("worst_squared", ctypes.c_double),
        ("worst_group", ctypes.c_int64),
        ("num_unusable", ctypes.c_int64),
    ]


class _SearchSettings(ctypes.Structure):
    _fields_ = [("factors", ctypes.c_void_p), ("num_factors", ctypes.c_int32), ("num_fits", ctypes.c_int32)]


class _Job(ctypes.Structure):
    _fields_ = [
        ("input", ctypes.c_void_p),
        ("element_bytes", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("code_stride", ctypes.c_int64),
        ("total", ctypes.POINTER(_Statistics)),
    ]


KINDS = {"int4": 0, "int8": 1, "fp8": 2}
INSTRUCTION_SETS = ("baseline", "avx2", "avx512")


def int4(weight: Tensor, group: int, *, zero_points: bool = False, search: str = DEFAULT_SEARCH) -> Quantized:
    """Codes -8 .. 7 as code + 8, eight to an int32 along the input, lowest nibble first; bf16 scales.

    Of a matrix with zero points a block of rows must start on a multiple of eight: they are packed along the output.
    """
    _check(weight)
    if group not in GROUPS or weight.shape[1] % group:
        raise BadInput(
            f"int4 needs rows in whole groups of 32, 64 or 128; {weight.shape[1]} inputs in groups of {group} are not supported"
        )
    factors = [1 / over for over in (ASYMMETRIC if zero_points else SYMMETRIC)[search]]
    rows, groups = weight.shape[0], weight.shape[1] // group
    native = _native(weight)
    if native is None:
        codes, scale, zeros, statistics = quantize_reference.int4(weight, group, factors, zero_points)
    else:
        codes = torch.empty(rows, weight.shape[1] // 8, dtype=torch.int32)
        scale = torch.empty(rows, groups, dtype=torch.bfloat16)
        zeros = torch.empty(rows, groups, dtype=torch.int8) if zero_points else None
        statistics = _run(native, "int4", weight, group, codes, scale, factors, zeros)
    return Quantized(codes, scale, None if zeros is None else pack_zero_points(zeros), statistics)


def int8(weight: Tensor, group: int | None = None) -> Quantized:
    """Codes -128 .. 127 as code + 128, four to an int32 along the input; a bf16 scale per group, or per row without one."""
    _check(weight)
    length = group or weight.shape[1]
    if length == 0 or weight.shape[1] % length or (group and group % 4):
        raise BadInput(
            f"int8 needs rows in whole groups of a multiple of 4; {weight.shape[1]} inputs in groups of {group} are not supported"
        )
    native = _native(weight)
    if native is None:
        return Quantized(*quantize_reference.int8(weight, length))
    codes = torch.empty(weight.shape[0], -(-weight.shape[1] // 4), dtype=torch.int32)
    scale = torch.empty(weight.shape[0], weight.shape[1] // length, dtype=torch.bfloat16)
    return Quantized(codes, scale, None, _run(native, "int8", weight, length, codes, scale))


def fp8(weight: Tensor) -> Quantized:
    """E4M3 codes (a float8_e4m3fn tensor) with an fp32 scale per row."""
    _check(weight)
    native = _native(weight)
    if native is None:
        return Quantized(*quantize_reference.fp8(weight))
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scale = torch.empty(weight.shape[0], 1, dtype=torch.float32)
    return Quantized(codes, scale, None, _run(native, "fp8", weight, weight.shape[1], codes, scale))


def pack_zero_points(zeros: Tensor) -> Tensor:
    """[n, groups] of -8 .. 7 to int32 [ceil(n / 8), groups]: eight rows to a word, the first in the lowest nibble."""
    rows, groups = zeros.shape
    stored = torch.zeros(-(-rows // 8) * 8, groups, dtype=torch.int32, device=zeros.device)
    stored[:rows] = zeros.to(torch.int32) + 8
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=zeros.device).view(1, 8, 1)
    return (stored.view(-1, 8, groups) << shifts).sum(dim=1, dtype=torch.int32)


def unpack_zero_points(packed: Tensor, rows: int) -> Tensor:
    """int32 [ceil(rows / 8), groups] to fp32 [rows, groups] of -8 .. 7."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device).view(1, 8, 1)
    return ((packed.unsqueeze(1) >> shifts) & 15).flatten(0, 1)[:rows].float() - 8.0


def instruction_set() -> str:
    """The instruction set in use: `avx512`, `avx2`, `baseline` (SSE2 or NEON), or `torch`."""
    native = build.library("quantize")
    return "torch" if native is None else INSTRUCTION_SETS[_best_set(native)]


def _check(weight: Tensor) -> None:
    if weight.dim() != 2 or weight.dtype not in INPUTS:
        raise BadInput(f"only bf16, fp16 or fp32 matrices can be quantized, not {weight.dtype} {tuple(weight.shape)}")


def _native(weight: Tensor) -> ctypes.CDLL | None:
    return build.library("quantize") if weight.device.type == "cpu" else None


def _best_set(native: ctypes.CDLL) -> int:
    return native.windlass_instruction_set()


def _run(
    native: ctypes.CDLL,
    kind: str,
    weight: Tensor,
    length: int,
    codes: Tensor,
    scale: Tensor,
    factors: Sequence[float] = (),
    zeros: Tensor | None = None,
) -> Statistics:
    weight = weight.contiguous()
    total = _Statistics(worst_group=-1)
    table = (ctypes.c_float * max(len(factors), 1))(*factors)
    search = _SearchSettings(ctypes.cast(table, ctypes.c_void_p), len(factors), quantize_reference.NUM_FITS)
    job = _Job(
        input=weight.data_ptr(),
        element_bytes=weight.element_size(),
        num_groups=scale.numel(),
        length=length,
        codes=codes.data_ptr(),
        scales=scale.data_ptr(),
        # The loop sees groups, not rows; only a row that is one group may end within a word.
        code_stride=codes.numel() * codes.element_size() // max(scale.numel(), 1),
        total=ctypes.pointer(total),
    )
    pointer = ctypes.c_void_p(0 if zeros is None else zeros.data_ptr())
    native.windlass_quantize(
        _best_set(native), KINDS[kind], INPUTS[weight.dtype], ctypes.byref(job), ctypes.byref(search), pointer
    )
    return Statistics(total.squared_error, total.squared_weight, total.worst_squared, total.worst_group, total.num_unusable)
