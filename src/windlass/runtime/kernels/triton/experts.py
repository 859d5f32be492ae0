"""The routed feed-forward: rows sorted by expert on the device, two grouped matmuls, one weighted sum per row.

A row's experts are summed in the order of its choices; experts on other ranks add nothing.
"""

# ruff: noqa: N803 (compile-time constants are in capitals)

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.runtime.kernels.arguments import ExpertsArgs
from windlass.runtime.kernels.triton.activate import gated
from windlass.runtime.kernels.triton.device import num_processors
from windlass.runtime.kernels.triton.tiles.dispatch import Dispatch, dispatch
from windlass.runtime.kernels.triton.tiles.product import Tiling, TritonMatrix, matrix, num_slices, product
from windlass.runtime.kernels.triton.tiles.types import is_float

BLOCK = 512


@triton.jit(do_not_specialize=["num_items", "num_tiles", "items_of_row", "slice_steps"])
def _grouped(
    result, weight, scale, offset, x, order, tiles, num_items, num_tiles, items_of_row, num_out, num_in, row_codes, row_groups,
    x_stride, slice_steps,
    KIND: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, TYPE: tl.constexpr, ASM: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """result [slices, items, out]: rows of x (item // items_of_row) times the matrices of their experts."""
    tile = tl.program_id(1)
    expert = tl.load(tiles + tile).to(tl.int64)
    if expert >= 0:
        number = tl.arange(0, BLOCK_ROWS)
        count = tl.load(tiles + 2 * num_tiles + tile)
        item = tl.load(order + tl.load(tiles + num_tiles + tile) + tl.minimum(number, count - 1))
        out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
        first = tl.program_id(2) * slice_steps
        last = tl.minimum(first + slice_steps, tl.cdiv(num_in, BLOCK_IN))
        if KIND != "plain":
            scale += expert * num_out * row_groups
        if KIND == "int4_zeros" or KIND == "int4_minima":
            offset += expert * num_out * row_groups
        total = product(
            weight + expert * num_out * row_codes, scale, offset, tl.minimum(out, num_out - 1), x,
            (item // items_of_row).to(tl.int64) * x_stride, num_in, row_codes, row_groups, first, last,
            KIND, GROUP, EVEN, TYPE, ASM, BLOCK_OUT, BLOCK_ROWS, BLOCK_IN,
        )  # fmt: skip
        at = (tl.program_id(2) * num_items + item).to(tl.int64)[None, :] * num_out + out[:, None]
        tl.store(result + at, total.to(result.dtype.element_ty), mask=(out < num_out)[:, None] & (number < count)[None, :])


@triton.jit
def _summed(parts, bias, item, expert, out, inside, num_items, num_out, slices):
    """One item's product: its slices in order, and the bias of its expert."""
    total = tl.load(parts + item * num_out + out, mask=inside, other=0).to(tl.float32)
    for number in range(1, slices):
        total += tl.load(parts + (number * num_items + item) * num_out + out, mask=inside, other=0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + expert * num_out + out, mask=inside & (expert >= 0), other=0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["num_items", "slices"])
def _hidden(result, parts, bias, ids, num_items, width, num_experts, clamp, slices, KIND: tl.constexpr, BLOCK: tl.constexpr):
    item = tl.program_id(0).to(tl.int64)
    expert = tl.load(ids + item).to(tl.int64)
    expert = tl.where(expert < num_experts, expert, -1)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (at < width) & (expert >= 0)
    gate = _summed(parts, bias, item, expert, at, inside, num_items, 2 * width, slices)
    up = _summed(parts, bias, item, expert, width + at, inside, num_items, 2 * width, slices)
    tl.store(result + item * width + at, gated(gate, up, clamp, KIND).to(result.dtype.element_ty), mask=at < width)


@triton.jit(do_not_specialize=["num_items", "slices"])
def _combine(
    result, parts, bias, ids, weights, add, num_items, num_out, num_experts, add_stride, slices,
    ACTIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    out = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in range(ACTIVE):
        item = row * ACTIVE + choice
        expert = tl.load(ids + item).to(tl.int64)
        expert = tl.where(expert < num_experts, expert, -1)
        output = _summed(parts, bias, item, expert, out, (out < num_out) & (expert >= 0), num_items, num_out, slices)
        total += output * tl.load(weights + item).to(tl.float32)
    if add is not None:
        total += tl.load(add + row * add_stride + out, mask=out < num_out, other=0).to(tl.float32)
    tl.store(result + row * num_out + out, total.to(result.dtype.element_ty), mask=out < num_out)


@dataclass(frozen=True)
class PartialSums:
    """The result of `_grouped`: [slices, items, out]."""

    parts: Tensor
    slices: int


def experts(args: ExpertsArgs) -> Tensor | None:
    x, ids, weights, add = args.x, args.ids, args.weights, args.add
    first, second = matrix(args.gate_up), matrix(args.down)
    if first is None or second is None or x.dim() != 2 or not is_float(x, weights, args.gate_up_bias, args.down_bias, add):
        return None
    x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
    gate_up_bias, down_bias = (None if bias is None else bias.contiguous() for bias in (args.gate_up_bias, args.down_bias))
    dtype = x.dtype if add is None else torch.promote_types(x.dtype, add.dtype)
    result = torch.empty((x.shape[0], second.num_out), dtype=dtype, device=x.device)
    if not ids.numel():
        return result.zero_() if add is None else result.copy_(add)
    num_experts, items, width = first.weight.shape[0], ids.numel(), second.num_in
    typical_rows = -(-items // (2 * num_experts))  # half the average rows of an expert: few tiles are partly empty
    tilings = first.tiling(typical_rows, x.dtype), second.tiling(typical_rows, x.dtype)
    sorted_items = dispatch(ids, num_experts, tilings[0].block_rows)
    inner = _sums(x, first, tilings[0], sorted_items, ids.shape[1])
    hidden = torch.empty((items, width), dtype=x.dtype, device=x.device)
    _hidden[(items, triton.cdiv(width, BLOCK))](
        hidden, inner.parts, gate_up_bias, ids, items, width, num_experts, inf if args.clamp is None else float(args.clamp),
        inner.slices, KIND=args.activation.value, BLOCK=BLOCK,
    )  # fmt: skip
    outer = _sums(hidden, second, tilings[1], sorted_items, 1)
    _combine[(x.shape[0], triton.cdiv(second.num_out, BLOCK))](
        result, outer.parts, down_bias, ids, weights, add, items, second.num_out, num_experts, 0 if add is None else add.stride(0),
        outer.slices, ACTIVE=ids.shape[1], BLOCK=BLOCK,
    )  # fmt: skip
    return result


def _sums(x: Tensor, given: TritonMatrix, tiling: Tiling, items: Dispatch, items_of_row: int) -> PartialSums:
    steps = triton.cdiv(given.num_in, tiling.block_in)
    outs = triton.cdiv(given.num_out, tiling.block_out)
    slices = num_slices(outs * items.num_tiles, tiling.programs * num_processors(x.device), steps)
    slice_steps = triton.cdiv(steps, slices)
    slices = triton.cdiv(steps, slice_steps)
    dtype = x.dtype if slices == 1 else torch.float32
    parts = torch.empty((slices, items.num_items, given.num_out), dtype=dtype, device=x.device)
    _grouped[(outs, items.num_tiles, slices)](
        parts, given.weight, given.scale, given.offset, x, items.order, items.tiles, items.num_items, items.num_tiles, items_of_row,
        given.num_out, given.num_in, given.row_codes, given.num_groups, x.stride(0), slice_steps, **given.constants(tiling, x.dtype),
    )  # fmt: skip
    return PartialSums(parts, slices)
