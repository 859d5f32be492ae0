"""Residual sums, the norm after them, and the output head of one row."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.runtime.kernels.cuda import driver
from windlass.runtime.kernels.cuda.int8 import RoundedRows

FEW_ROWS = 64
FEW = (1024, 1)
MANY = {2048: (512, 4), 4096: (1024, 2), 6144: (512, 2), 8192: (1024, 1), 16384: (1024, 1)}
"""By maximum width: threads per row, and rows at once on a multiprocessor. The fastest of eight at 2,048 rows (docs/reference/cuda-notes.md, 21)."""


def add_norm(
    residual: Tensor,
    norm: Tensor,
    out: Tensor | None,
    eps: float,
    *,
    parts: Tensor | None = None,
    weights: Tensor | None = None,
    rounded: RoundedRows | None = None,
) -> None:
    """residual fp32 [rows, width] += the parts, in order; out bf16 [rows, width] = rms norm of it, and `rounded` the same in 8 bits.

    parts fp32 or bf16 [parts, rows, width] (slices of a product), or with `weights` [rows, n] fp32: [rows, parts, width], the first n weighted.
    """
    rows, width = residual.shape
    threads, blocks = FEW if rows <= FEW_ROWS else next(config for most, config in MANY.items() if width <= most)
    steps = -(-width // (4 * threads))
    run = driver.kernel(
        "small.cu", "PPIPIIQQPPPPIf", "add_norm", packed=False, NORM_THREADS=threads, NORM_STEPS=steps, NORM_BLOCKS=blocks
    )
    num_parts = 0 if parts is None else parts.shape[0] if weights is None else parts.shape[1]
    by_part = 0 if parts is None else parts.stride(0) if weights is None else parts.stride(1)
    by_row = 0 if parts is None else parts.stride(1) if weights is None else parts.stride(0)
    num_weights = 0 if weights is None else weights.shape[1]
    bf16 = int(parts is not None and parts.dtype == torch.bfloat16)
    codes, scales = rounded or (None, None)
    run(
        (rows,), threads, residual, parts, bf16, weights, num_parts, num_weights, by_part, by_row, norm, out, codes, scales, width, eps
    )  # fmt: skip


def head_one(x: Tensor, norm: Tensor, weight: Tensor, out: Tensor, eps: float) -> Tensor:
    """out fp32 [outputs] = norm(x) @ weight.T, x fp32 [inputs], weight bf16 [outputs, inputs]."""
    run = driver.kernel("small.cu", "PPPPIIf", "head_one", packed=False)
    run((driver.num_processors(),), 512, x, norm, weight, out, weight.shape[1], weight.shape[0], eps)
    return out
