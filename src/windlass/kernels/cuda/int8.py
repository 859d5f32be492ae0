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

from windlass.core.fused import BLOCK_INPUTS, TILE_ROWS
from windlass.kernels.cuda import driver
from windlass.kernels.cuda.layout import Tiles
from windlass.kernels.cuda.linear import WHOLE_BUDGET, WIDE
from windlass.kernels.cuda.route import Routes

GROUP = 128


class Shape(NamedTuple):
    """Of a thread block's work, see int8.cu."""

    warpgroups: int
    deep: int
    sets: int
    fragments: int
    stage_blocks: int

    @property
    def tiles(self) -> int:
        return self.warpgroups * 4 * self.deep

    @property
    def threads(self) -> int:
        return self.warpgroups * 128 + 128


SHAPES = {
    16: Shape(3, 2, 2, 2, 2),
    32: Shape(3, 2, 2, 2, 2),
    48: Shape(2, 2, 2, 2, 2),
    64: Shape(2, 2, 2, 2, 2),
    80: Shape(2, 2, 1, 2, 2),
    128: Shape(2, 2, 1, 1, 1),
}
"""For items of experts, by their rows of x; the fastest of those tried (docs/reference/cuda-notes.md)."""
ITEM_SECONDS = {16: 0.45e-6, 32: 0.50e-6, 48: 0.63e-6, 64: 0.735e-6, 80: 0.96e-6}
"""Of a block of inputs of 256 rows of weights, by the rows of an item. Measured in products of 128 to 2,048 rows."""


class UnitKind(NamedTuple):
    """A way to cut a product of all rows into units."""

    rows: int
    """Of x."""
    shape: Shape
    seconds: float
    """Of a block of inputs."""


UNIT_KINDS = (
    UnitKind(16, Shape(2, 2, 2, 2, 2), 0.54e-6),
    UnitKind(16, Shape(2, 1, 2, 2, 2), 0.275e-6),
    UnitKind(32, Shape(2, 2, 2, 2, 2), 0.55e-6),
    UnitKind(32, Shape(2, 1, 2, 2, 2), 0.28e-6),
    UnitKind(48, Shape(2, 2, 2, 2, 2), 0.63e-6),
    UnitKind(64, Shape(2, 2, 2, 2, 2), 0.735e-6),
    UnitKind(64, Shape(2, 1, 2, 2, 2), 0.39e-6),
    UnitKind(80, Shape(2, 2, 1, 2, 2), 0.96e-6),
    UnitKind(128, Shape(2, 2, 1, 1, 1), 1.48e-6),
)
"""Measured in products of 32 to 2,048 rows. Small units fill the device where a matrix has few rows."""
PARTS_BYTES_PER_SECOND = 3.5e12
MOST_SLICES = 8


class Cut(NamedTuple):
    """How a product is cut into units: rows of x in each, the work of a thread block, and slices of the inputs."""

    rows: int
    shape: Shape
    slices: int


def item_rows(mean: float) -> int:
    """Rows of an item, for experts with so many rows on average: the fastest if all have two standard deviations more."""
    most = mean + 2 * mean**0.5
    return min(ITEM_SECONDS, key=lambda size: -(-most // size) * ITEM_SECONDS[size])


@functools.cache
def cut(rows: int, tiles: int, blocks: int, processors: int, most_slices: int = MOST_SLICES) -> Cut:
    """The fastest way to cut a product of so many rows of x."""

    def seconds(kind: UnitKind, slices: int) -> float:
        units = -(-tiles // kind.shape.tiles) * slices * -(-rows // kind.rows)
        waves = -(-units // processors)
        parts = 2 * 4 * slices * rows * tiles * TILE_ROWS if slices > 1 else 0
        return waves * blocks // slices * kind.seconds + parts / PARTS_BYTES_PER_SECOND

    divisors = [n for n in range(1, most_slices + 1) if blocks % n == 0]
    kind, slices = min(((kind, n) for kind in UNIT_KINDS for n in divisors), key=lambda way: seconds(*way))
    return Cut(kind.rows, kind.shape, slices)


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
    """A kernel: what it does, with which matrix, units of how many rows and which shape, slices of how many blocks, and whether of a list."""

    kind: int
    weight: Tiles
    rows: int
    shape: Shape
    blocks: int
    items: int

    @property
    def unit(self) -> driver.Unit:
        return kernel(self.kind, self.weight, self.rows, self.blocks, items=self.items, shape=self.shape)[0].unit

    def __hash__(self) -> int:
        return hash(self._key())

    def __eq__(self, other: object) -> bool:
        """Matrices of the same shape have the same kernel."""
        return isinstance(other, Variant) and self._key() == other._key()

    def _key(self) -> tuple[int | Shape, ...]:
        return self.kind, self.rows, self.shape, self.blocks, self.items, self.weight.group


def whole_cut(rows: int, weight: Tiles) -> Cut:
    """Of a product without slices."""
    return cut(rows, weight.num_tiles, weight.tile_blocks, driver.num_processors(), most_slices=1)


def whole_variant(rows: int, weight: Tiles) -> Variant:
    way = whole_cut(rows, weight)
    return Variant(0, weight, way.rows, way.shape, weight.tile_blocks, 0)


def parts_variant(rows: int, weight: Tiles) -> Variant:
    way = cut(rows, weight.num_tiles, weight.tile_blocks, driver.num_processors())
    return Variant(0 if way.slices == 1 else 2, weight, way.rows, way.shape, weight.tile_blocks // way.slices, 0)


def gate_up_variant(rows: int, weight: Tiles) -> Variant:
    """Of a dense feed-forward."""
    way = whole_cut(rows, weight)
    return Variant(1, weight, way.rows, way.shape, weight.tile_blocks, 1)


def item_variants(rows: int, gate_up: Tiles, down: Tiles) -> set[Variant]:
    """Of experts, for items of so many rows."""
    return {Variant(kind, of, rows, SHAPES[rows], of.tile_blocks, 1) for kind, of in ((1, gate_up), (3, down))}


def kernel(
    kind: int, weight: Tiles, rows: int, blocks: int, *, items: int, shape: Shape | None = None
) -> tuple[driver.Kernel, int, Shape]:
    """int8.cu for units of `rows` rows of x and slices of `blocks` blocks of inputs, and its bytes of shared memory."""
    shape = shape or SHAPES[rows]
    stage_blocks = min(shape.stage_blocks, blocks)
    stage_bytes = (
        -(-(-(-stage_blocks * rows * 132 // 128) * 128 + shape.tiles * stage_blocks * weight.block_bytes) // 1024) * 1024
    )
    stages = min(8, (WHOLE_BUDGET - rows * 4) // (stage_bytes + 20))
    shared = stages * (stage_bytes + 20) + rows * 4
    run = driver.kernel(
        "int8.cu", WIDE, shared_bytes=shared, KIND=kind, N=rows, ITEMS=items, WGS=shape.warpgroups, DEEP=shape.deep, SETS=shape.sets,
        FRAGMENTS=shape.fragments, STAGES=stages, STAGE_BLOCKS=stage_blocks, TAIL=blocks % stage_blocks, GROUP=weight.group,
    )  # fmt: skip
    return run, shared, shape


def linear(
    x: RoundedRows,
    weight: Tiles,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    slices: int = 1,
    rows: int = 128,
    shape: Shape | None = None,
) -> Tensor:
    """out bf16 [rows, outputs], or fp32 [slices, rows, outputs]: sums of slices of the inputs. `rows`: of x in a unit."""
    partial, blocks = out.dtype == torch.float32, weight.tile_blocks // slices
    assert (partial or slices == 1) and blocks * slices == weight.tile_blocks
    run, shared, shape = kernel(2 if partial else 0, weight, rows, blocks, items=0, shape=shape)
    count = x.codes.shape[0]
    units = -(-weight.num_tiles // shape.tiles) * slices * -(-count // rows)
    run(
        (min(units, driver.num_processors()),), shape.threads, driver.rows_map(weight.data, shape.tiles), x.codes, x.scales, bias, out,
        None, None, None, None, out.stride(-2), out.stride(0), x.codes.stride(0), weight.num_tiles, slices, blocks, count, shared_bytes=shared,
    )  # fmt: skip
    return out


def linear_whole(x: RoundedRows, weight: Tiles, out: Tensor, bias: Tensor | None = None) -> Tensor:
    """out bf16 [rows, outputs]."""
    way = whole_cut(x.codes.shape[0], weight)
    return linear(x, weight, out, bias=bias, rows=way.rows, shape=way.shape)


def linear_parts(x: RoundedRows, weight: Tiles) -> Tensor:
    """Parts that `norm.add_norm` adds up: fp32 [slices, rows, outputs], or bf16 [1, rows, outputs]."""
    count = x.codes.shape[0]
    way = cut(count, weight.num_tiles, weight.tile_blocks, driver.num_processors())
    dtype = torch.bfloat16 if way.slices == 1 else torch.float32
    parts = torch.empty(way.slices, count, weight.rows, dtype=dtype, device=x.codes.device)
    linear(x, weight, parts[0] if way.slices == 1 else parts, rows=way.rows, slices=way.slices, shape=way.shape)
    return parts


def gate_up(x: RoundedRows, weight: Tiles, out: Tensor, routes: Routes, *, shape: Shape | None = None) -> Tensor:
    """out bf16 [rows * (active + shared), width], for items of `route.dispatch`."""
    return _experts(1, x, weight, out, routes, routes.item_rows, shape)


def down(x: RoundedRows, weight: Tiles, out: Tensor, routes: Routes, *, shape: Shape | None = None) -> Tensor:
    """x of [rows * (active + shared), width]; out bf16 [rows * (active + shared), outputs], not yet weighted."""
    return _experts(3, x, weight, out, routes, routes.item_places, shape)


def _experts(kind: int, x: RoundedRows, weight: Tiles, out: Tensor, routes: Routes, rows: Tensor, shape: Shape | None) -> Tensor:
    run, shared, shape = kernel(kind, weight, rows.shape[1], weight.tile_blocks, items=1, shape=shape)
    run(
        (driver.num_processors(),), shape.threads, driver.rows_map(weight.data, shape.tiles), x.codes, x.scales, None, out,
        routes.num_items, routes.item_expert, rows, routes.item_places, out.stride(0), 0, x.codes.stride(0), weight.num_tiles,
        1, weight.tile_blocks, 0, shared_bytes=shared,
    )  # fmt: skip
    return out
