"""Activation functions of a feed-forward: computed in fp32, rounded once."""

# ruff: noqa: N803 (compile-time constants are in capitals)

from __future__ import annotations

from math import inf

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.core.model import Activation
from windlass.runtime.kernels.constants import CLAMPED_SWIGLU_SLOPE
from windlass.runtime.kernels.triton.tiles.types import is_float

BLOCK = 1024
SLOPE = tl.constexpr(CLAMPED_SWIGLU_SLOPE)


@triton.jit
def activated(x, KIND: tl.constexpr):
    if KIND == "silu":
        x = x * tl.sigmoid(x)
    elif KIND == "gelu":
        x = 0.5 * x * (1 + tl.math.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":  # (1 + tanh(y)) / 2 is the sigmoid of 2 y
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        x = x * tl.sigmoid(x * SLOPE)
    return x


@triton.jit
def gated(gate, up, clamp, KIND: tl.constexpr):
    gate = activated(tl.minimum(gate, clamp), KIND)
    up = tl.maximum(tl.minimum(up, clamp), -clamp)
    if KIND == "clamped_swiglu":
        up += 1
    return gate * up


@triton.jit
def _activate(result, x, width, x_stride, clamp, KIND: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(x + row * x_stride + at, mask=at < width, other=0).to(tl.float32)
    if GATED:
        second = tl.load(x + row * x_stride + width + at, mask=at < width, other=0).to(tl.float32)
        result_row = gated(first, second, clamp, KIND)
    else:
        result_row = activated(first, KIND)
    tl.store(result + row * width + at, result_row.to(result.dtype.element_ty), mask=at < width)


def activate(x: Tensor, activation: Activation, is_gated: bool, clamp: float | None = None) -> Tensor | None:
    if x.dim() != 2 or x.stride(1) != 1 or not is_float(x):
        return None
    width = x.shape[1] // 2 if is_gated else x.shape[1]
    result = torch.empty((x.shape[0], width), dtype=x.dtype, device=x.device)
    if x.shape[0]:
        _activate[(x.shape[0], triton.cdiv(width, BLOCK))](
            result,
            x,
            width,
            x.stride(0),
            inf if clamp is None else float(clamp),
            KIND=activation.value,
            GATED=is_gated,
            BLOCK=BLOCK,
        )
    return result
