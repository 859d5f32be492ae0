"""Products of many rows with 4-bit weights in integer arithmetic: activations are rounded to 8 bits, with a step for each row and 128 inputs.

Codes of 4 bits are exact in 8, sums of 128 inputs are exact in 32, and Hopper multiplies bytes twice as fast as bf16. What is lost is the
rounding of the activations: about 0.6 % of a result's size, several times less than what weights of 4 bits lose.
Weights in groups of 128 only.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.core.fused import BLOCK_INPUTS
from windlass.core.integer_units import MOST_SLICES, SHAPES, Cut, Shape, cut
from windlass.runtime.kernels.cuda import driver
from windlass.runtime.kernels.cuda.layout import Tiles
from windlass.runtime.kernels.cuda.linear import WHOLE_BUDGET, WIDE
from windlass.runtime.kernels.cuda.route import Routes

INT8 = f"MPP{WIDE}"
"""Arguments of int8.cu: a tensor map of x, sums and flags, and what wide.cu has too."""
GROUP = 128
MOST_SUMS = 256 * 128
"""Of a thread block: threads, and sums of each."""
WARPS = 8
"""Of a thread block that multiply."""
LEAST_BLOCKS = 4
"""Of inputs for a thread block: handing on sums takes as long as a few."""


class RoundedRows(NamedTuple):
    codes: Tensor
    """int8 [rows, inputs], in the order of the weights' codes"""
    scales: Tensor
    """fp32 [rows, inputs / 128]: a sixteenth of a step, as the kernel's weights are 16 times too high"""


def empty_rows(rows: int, inputs: int, device: torch.device) -> RoundedRows:
    return RoundedRows(
        torch.empty(rows, inputs, dtype=torch.int8, device=device),
        torch.empty(rows, inputs // BLOCK_INPUTS, dtype=torch.float32, device=device),
    )


def quantize_rows(x: Tensor) -> RoundedRows:
    """x bf16 [rows, inputs], inputs a multiple of 128, rows at multiples of 16 bytes."""
    rows, inputs = x.shape
    blocks = inputs // BLOCK_INPUTS
    result = empty_rows(rows, inputs, x.device)
    run = driver.kernel("small.cu", "PPPIII", "quantize_rows", packed=False)
    total = rows * blocks
    run((-(-total // 32),), 256, x, result.codes, result.scales, x.stride(0), blocks, total)
    return result


def supports(weight: Tiles) -> bool:
    return weight.group == GROUP


@dataclass(frozen=True)
class Variant:
    """A kernel: what it does, with which matrix, units of how many rows and which shape, and whether of a list."""

    kind: int
    weight: Tiles
    rows: int
    shape: Shape
    items: int

    @property
    def unit(self) -> driver.Unit:
        return kernel(self.kind, self.weight, self.rows, items=self.items, shape=self.shape)[0].unit

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        """Matrices of the same shape have the same kernel."""
        return isinstance(other, Variant) and self._key() == other._key()

    def _key(self) -> tuple[int | Shape, ...]:
        return self.kind, self.rows, self.shape, self.items, self.weight.group


def whole_cut(rows: int, weight: Tiles) -> Cut:
    """Of a product without slices."""
    return parts_cut(rows, weight, most_slices=1)


def parts_cut(rows: int, weight: Tiles, most_slices: int = MOST_SLICES) -> Cut:
    return cut(rows, weight.num_tiles, weight.tile_blocks, driver.num_processors(), most_slices)


def whole_variant(rows: int, weight: Tiles) -> Variant:
    way = whole_cut(rows, weight)
    return Variant(0, weight, way.rows, way.shape, 0)


def parts_variant(rows: int, weight: Tiles) -> Variant:
    way = parts_cut(rows, weight)
    return Variant(0 if way.slices == 1 else 2, weight, way.rows, way.shape, 0)


def gate_up_variant(rows: int, weight: Tiles) -> Variant:
    """Of a dense feed-forward."""
    way = whole_cut(rows, weight)
    return Variant(1, weight, way.rows, way.shape, 0)


def item_variants(rows: int, gate_up: Tiles, down: Tiles) -> set[Variant]:
    """Of experts, for items of so many rows."""
    return {Variant(1, gate_up, rows, SHAPES[rows], 1), Variant(3, down, rows, SHAPES[rows], 1)}


def kernel(kind: int, weight: Tiles, rows: int, *, items: int, shape: Shape | None = None) -> tuple[driver.Kernel, int, Shape]:
    """int8.cu for units of `rows` rows of x, and its bytes of shared memory."""
    shape = shape or SHAPES[rows]
    stage_bytes = -(-(-(-rows * 132 // 128) * 128 + shape.tiles * weight.block_bytes) // 1024) * 1024
    rest = rows * 4
    stages = min(8, (WHOLE_BUDGET - rest) // (stage_bytes + 20))
    shared = stages * (stage_bytes + 20) + rest
    run = driver.kernel(
        "int8.cu", INT8, shared_bytes=shared, KIND=kind, N=rows, ITEMS=items, WGS=shape.warpgroups, SPLIT=shape.split,
        FRAGMENTS=shape.fragments, STAGES=stages, GROUP=weight.group,
    )  # fmt: skip
    return run, shared, shape


def cut_units() -> tuple[Tensor, Tensor]:
    return _cut_units(torch.cuda.current_device())


@functools.cache
def _cut_units(device: int) -> tuple[Tensor, Tensor]:
    """Sums of units that are cut between thread blocks, and whether they are there, which is zero between launches. One of each is enough, since
    one kernel at a time uses them."""
    count, on = driver.num_processors(device), f"cuda:{device}"
    return torch.empty(count, MOST_SUMS, device=on), torch.zeros(count, WARPS, dtype=torch.int32, device=on)


def linear(x: RoundedRows, weight: Tiles, out: Tensor, *, bias: Tensor | None = None, way: Cut | None = None) -> Tensor:
    """out bf16 [rows, outputs], or fp32 [slices, rows, outputs]: sums of slices of the inputs. `way`: how it is cut, if not in the fastest way."""
    way = way or whole_cut(x.codes.shape[0], weight)
    assert out.dim() == (2 if way.slices == 1 else 3)
    return _all_rows(0 if way.slices == 1 else 2, x, weight, out, bias, way)


def linear_parts(x: RoundedRows, weight: Tiles) -> Tensor:
    """Parts that `norm.add_norm` adds up: fp32 [slices, rows, outputs], or bf16 [1, rows, outputs]."""
    count = x.codes.shape[0]
    way = parts_cut(count, weight)
    dtype = torch.bfloat16 if way.slices == 1 else torch.float32
    parts = torch.empty(way.slices, count, weight.rows, dtype=dtype, device=x.codes.device)
    linear(x, weight, parts[0] if way.slices == 1 else parts, way=way)
    return parts


def gate_up_rounded(x: RoundedRows, weight: Tiles, next_inputs: int, places: int, routes: Routes) -> RoundedRows:
    """Of [rows * (active + shared), next_inputs], for items of `route.dispatch`.

    `next_inputs`: of the product that follows, with what fills them up to whole blocks, which is zero."""
    return quantize_rows(gate_up(x, weight, _hidden(weight, next_inputs, places), routes))


def dense_gate_up_rounded(x: RoundedRows, weight: Tiles, next_inputs: int, way: Cut | None = None) -> RoundedRows:
    """The same of a dense feed-forward, [rows, next_inputs]."""
    count = x.codes.shape[0]
    way = way or whole_cut(count, weight)
    return quantize_rows(_all_rows(1, x, weight, _hidden(weight, next_inputs, count), None, way))


def _hidden(weight: Tiles, inputs: int, rows: int) -> Tensor:
    make = torch.zeros if inputs > weight.rows // 2 else torch.empty
    return make(rows, inputs, dtype=torch.bfloat16, device=weight.data.device)


def gate_up(x: RoundedRows, weight: Tiles, out: Tensor, routes: Routes) -> Tensor:
    """out bf16 [rows * (active + shared), width], for items of `route.dispatch`."""
    return _experts(1, x, weight, out, routes, routes.item_rows)


def down(x: RoundedRows, weight: Tiles, out: Tensor, routes: Routes) -> Tensor:
    """x of [rows * (active + shared), width]; out bf16 [rows * (active + shared), outputs], not yet weighted."""
    return _experts(3, x, weight, out, routes, routes.item_places)


def _experts(kind: int, x: RoundedRows, weight: Tiles, out: Tensor, routes: Routes, rows: Tensor) -> Tensor:
    assert x.codes.shape[1] == weight.width
    run, shared, shape = kernel(kind, weight, rows.shape[1], items=1)
    run(
        (driver.num_processors(),), shape.threads, driver.NO_MAP, None, None, driver.rows_map(weight.data, shape.tiles), x.codes, x.scales,
        None, out, routes.num_items, routes.item_expert, rows, routes.item_places, out.stride(0), 0, x.codes.stride(0),
        weight.num_tiles, 1, weight.tile_blocks, 0, shared_bytes=shared,
    )  # fmt: skip
    return out


def _all_rows(kind: int, x: RoundedRows, weight: Tiles, out: Tensor, bias: Tensor | None, way: Cut) -> Tensor:
    """One matrix with all rows."""
    count, inputs = x.codes.shape
    assert inputs == weight.width and x.codes.is_contiguous()
    run, shared, shape = kernel(kind, weight, way.rows, items=0, shape=way.shape)
    blocks = weight.tile_blocks // way.slices
    units = -(-weight.num_tiles // shape.tiles) * way.slices * -(-count // way.rows)
    # Slices are not cut: there is a thread block for each.
    grid = min(units if way.slices > 1 else -(-units * blocks // LEAST_BLOCKS), driver.num_processors())
    sums, flags = cut_units()
    box = driver.box_map(x.codes.data_ptr(), count, inputs, BLOCK_INPUTS, way.rows)
    run(
        (grid,), shape.threads, box, sums, flags, driver.rows_map(weight.data, shape.tiles), x.codes, x.scales, bias, out,
        None, None, None, None, out.stride(-2), out.stride(0), inputs, weight.num_tiles, way.slices, blocks, count, shared_bytes=shared,
    )  # fmt: skip
    return out
