"""Linear layers with packed weights: x @ weight.T + bias + add. With few rows the inputs are split (split-K), and a second kernel sums the
slices."""

# ruff: noqa: N803 (compile-time constants are in capitals)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.runtime.kernels.packing.packed_rows import PackedRows
from windlass.runtime.kernels.triton.device import num_processors
from windlass.runtime.kernels.triton.tiles.product import TritonMatrix, matrix, num_slices, product
from windlass.runtime.kernels.triton.tiles.types import is_float

BLOCK = 512


@triton.jit(do_not_specialize=["num_rows", "slice_steps"])
def _linear(
    result, weight, scale, offset, x, bias, add, num_rows, num_out, num_in, row_codes, row_groups, x_stride, add_stride, slice_steps,
    KIND: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, TYPE: tl.constexpr, ASM: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_IN: tl.constexpr, SLICED: tl.constexpr,
):  # fmt: skip
    out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first = tl.program_id(2) * slice_steps
    last = tl.minimum(first + slice_steps, tl.cdiv(num_in, BLOCK_IN))
    total = product(
        weight, scale, offset, tl.minimum(out, num_out - 1), x, tl.minimum(row, num_rows - 1).to(tl.int64) * x_stride, num_in,
        row_codes, row_groups, first, last, KIND, GROUP, EVEN, TYPE, ASM, BLOCK_OUT, BLOCK_ROWS, BLOCK_IN,
    )  # fmt: skip
    inside = (out < num_out)[:, None] & (row < num_rows)[None, :]
    at = row.to(tl.int64)[None, :] * num_out + out[:, None]
    if SLICED:
        tl.store(result + tl.program_id(2).to(tl.int64) * num_rows * num_out + at, total, mask=inside)
    else:
        if bias is not None:
            total += tl.load(bias + out, mask=out < num_out, other=0).to(tl.float32)[:, None]
        if add is not None:
            total += tl.load(add + row.to(tl.int64)[None, :] * add_stride + out[:, None], mask=inside, other=0).to(tl.float32)
        tl.store(result + at, total.to(result.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "slices"])
def _finish(result, parts, bias, add, num_rows, num_out, add_stride, slices, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    out = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = out < num_out
    total = tl.zeros((BLOCK,), tl.float32)
    for number in range(slices):
        total += tl.load(parts + (number * num_rows + row) * num_out + out, mask=inside, other=0)
    if bias is not None:
        total += tl.load(bias + out, mask=inside, other=0).to(tl.float32)
    if add is not None:
        total += tl.load(add + row * add_stride + out, mask=inside, other=0).to(tl.float32)
    tl.store(result + row * num_out + out, total.to(result.dtype.element_ty), mask=inside)


def linear(x: Tensor, weight: Tensor | PackedRows, bias: Tensor | None = None, add: Tensor | None = None) -> Tensor | None:
    """Plain matrices are left to PyTorch."""
    if not isinstance(weight, PackedRows) or weight.num_experts or x.dim() != 2 or not is_float(x, bias, add):
        return None
    given = matrix(weight)
    assert given is not None
    if x.stride(1) != 1 or (add is not None and add.stride(1) != 1):
        x, add = x.contiguous(), None if add is None else add.contiguous()
    dtype = x.dtype if add is None else torch.promote_types(x.dtype, add.dtype)
    result = torch.empty((x.shape[0], given.num_out), dtype=dtype, device=x.device)
    if x.shape[0]:
        _run(result, x, given, bias, add)
    return result


def _run(result: Tensor, x: Tensor, given: TritonMatrix, bias: Tensor | None, add: Tensor | None) -> None:
    rows = x.shape[0]
    tiling = given.tiling(rows, x.dtype)
    steps = triton.cdiv(given.num_in, tiling.block_in)
    grid = triton.cdiv(given.num_out, tiling.block_out), triton.cdiv(rows, tiling.block_rows)
    slices = num_slices(grid[0] * grid[1], tiling.programs * num_processors(x.device), steps)
    slice_steps = triton.cdiv(steps, slices)
    slices = triton.cdiv(steps, slice_steps)
    add_stride = 0 if add is None else add.stride(0)
    sums = result if slices == 1 else torch.empty((slices, *result.shape), dtype=torch.float32, device=x.device)
    _linear[(*grid, slices)](
        sums, given.weight, given.scale, given.offset, x, bias, add, rows, given.num_out, given.num_in, given.row_codes,
        given.num_groups, x.stride(0), add_stride, slice_steps, SLICED=slices > 1, **given.constants(tiling, x.dtype),
    )  # fmt: skip
    if slices > 1:
        _finish[(triton.cdiv(given.num_out, BLOCK), rows)](
            result, sums, bias, add, rows, given.num_out, add_stride, slices, BLOCK=BLOCK, num_warps=4
        )
