"""Norms over the last dimension: a program per row."""

# ruff: noqa: N803 (compile-time constants are in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.runtime.kernels.triton.tiles.types import is_float

MAX_WIDTH = 32768


@triton.jit
def _norm(result, x, weight, bias, eps, width, x_stride, LAYER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    numbers = tl.load(x + row * x_stride + at, mask=inside, other=0).to(tl.float32)
    if LAYER:
        numbers = tl.where(inside, numbers - tl.sum(numbers, 0) / width, 0.0)
    made = numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) / width + eps)
    made *= tl.load(weight + at, mask=inside, other=0).to(tl.float32)
    if bias is not None:
        made += tl.load(bias + at, mask=inside, other=0).to(tl.float32)
    tl.store(result + row * width + at, made.to(result.dtype.element_ty), mask=inside)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: str) -> Tensor | None:
    width = x.shape[-1]
    if not is_float(x, weight, bias) or width > MAX_WIDTH or x.dim() < 2:
        return None
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, width).contiguous()
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        block = triton.next_power_of_2(width)
        _norm[(rows.shape[0],)](
            result, rows, weight, bias, eps, width, rows.stride(0), LAYER=kind == "layer", BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return result
