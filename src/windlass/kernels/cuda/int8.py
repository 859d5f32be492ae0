"""Products of many rows with 4-bit weights in integer arithmetic: activations are rounded to 8 bits, with a step for each row and 128 inputs.

Codes of 4 bits are exact in 8, sums of 128 inputs are exact in 32, and Hopper multiplies bytes twice as fast as bf16. What is lost is the
rounding of the activations: about 0.6 % of a result's size, several times less than what weights of 4 bits lose.
Weights in groups of 128 only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from windlass.core.fused import BLOCK_INPUTS
from windlass.core.integer_units import SHAPES, Cut, Shape, cut
from windlass.kernels.cuda import driver
from windlass.kernels.cuda.layout import Tiles
from windlass.kernels.cuda.linear import WHOLE_BUDGET, WIDE
from windlass.kernels.cuda.route import Routes

GROUP = 128
OUTPUT_TILES = BLOCK_INPUTS // 8
"""Of gate and up, whose outputs are a block: a tile has eight."""


class RoundedRows(NamedTuple):
    codes: Tensor
    """int8 [rows, inputs], in the order of the weights' codes"""
    scales: Tensor
    """fp32 [rows, inputs / 128]: a sixteenth of a step, as the kernel's weights are 16 times too high"""


Out = TypeVar("Out", Tensor, RoundedRows)


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
    return cut(rows, weight.num_tiles, weight.tile_blocks, driver.num_processors(), most_slices=1)


def whole_variant(rows: int, weight: Tiles) -> Variant:
    way = whole_cut(rows, weight)
    return Variant(0, weight, way.rows, way.shape, 0)


def parts_variant(rows: int, weight: Tiles) -> Variant:
    way = cut(rows, weight.num_tiles, weight.tile_blocks, driver.num_processors())
    return Variant(0 if way.slices == 1 else 2, weight, way.rows, way.shape, 0)


def gate_up_variant(rows: int, weight: Tiles) -> Variant:
    """Of a dense feed-forward."""
    way = whole_cut(rows, weight)
    return Variant(gate_up_kind(weight, way.shape), weight, way.rows, way.shape, 1)


def item_variants(rows: int, gate_up: Tiles, down: Tiles) -> set[Variant]:
    """Of experts, for items of so many rows."""
    shape = SHAPES[rows]
    return {Variant(gate_up_kind(gate_up, shape), gate_up, rows, shape, 1), Variant(3, down, rows, shape, 1)}


def kernel(kind: int, weight: Tiles, rows: int, *, items: int, shape: Shape | None = None) -> tuple[driver.Kernel, int, Shape]:
    """int8.cu for units of `rows` rows of x, and its bytes of shared memory."""
    shape = shape or SHAPES[rows]
    stage_bytes = -(-(-(-rows * 132 // 128) * 128 + shape.tiles * weight.block_bytes) // 1024) * 1024
    rest = rows * (16 if kind == 4 else 4) + 8
    stages = min(8, (WHOLE_BUDGET - rest) // (stage_bytes + 20))
    shared = stages * (stage_bytes + 20) + rest
    run = driver.kernel(
        "int8.cu", WIDE, shared_bytes=shared, KIND=kind, N=rows, ITEMS=items, WGS=shape.warpgroups, DEEP=shape.deep, SPLIT=shape.split,
        FRAGMENTS=shape.fragments, STAGES=stages, GROUP=weight.group,
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
    assert x.codes.shape[1] == weight.width
    partial, blocks = out.dtype == torch.float32, weight.tile_blocks // slices
    assert (partial or slices == 1) and blocks * slices == weight.tile_blocks
    run, shared, shape = kernel(2 if partial else 0, weight, rows, items=0, shape=shape)
    count = x.codes.shape[0]
    units = -(-weight.num_tiles // shape.tiles) * slices * -(-count // rows)
    run(
        (min(units, driver.num_processors()),), shape.threads, driver.rows_map(weight.data, shape.tiles), x.codes, x.scales, bias, out,
        None, None, None, None, None, out.stride(-2), out.stride(0), x.codes.stride(0), weight.num_tiles, slices, blocks, count, shared_bytes=shared,
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


def gate_up_kind(weight: Tiles, shape: Shape) -> int:
    """4 where the outputs of a unit are a block of 128 of the next product's inputs, so that they can be rounded at once; else 1."""
    return 4 if shape.deep == 2 and shape.tiles == OUTPUT_TILES and weight.num_tiles % OUTPUT_TILES == 0 else 1


def gate_up_rounded(
    x: RoundedRows, weight: Tiles, next_inputs: int, places: int, routes: Routes, *, shape: Shape | None = None
) -> RoundedRows:
    """Of [rows * (active + shared), next_inputs], for items of `route.dispatch`.

    `next_inputs`: of the product that follows, with what fills them up to whole blocks, which is zero."""
    width, device = weight.rows // 2, x.codes.device
    if gate_up_kind(weight, shape or SHAPES[routes.item_rows.shape[1]]) == 4:
        rounded = empty_rows(places, next_inputs, device)
        if next_inputs > width:
            rounded.codes[:, width:].zero_(), rounded.scales.zero_()
        return gate_up(x, weight, rounded, routes, shape=shape)
    make = torch.zeros if next_inputs > width else torch.empty
    out = make(places, next_inputs, dtype=torch.bfloat16, device=device)
    return quantize_rows(gate_up(x, weight, out, routes, shape=shape))


def gate_up(x: RoundedRows, weight: Tiles, out: Out, routes: Routes, *, shape: Shape | None = None) -> Out:
    """out [rows * (active + shared), width], bf16 or rounded, for items of `route.dispatch`."""
    return _experts(1 if isinstance(out, Tensor) else 4, x, weight, out, routes, routes.item_rows, shape)


def down(x: RoundedRows, weight: Tiles, out: Tensor, routes: Routes, *, shape: Shape | None = None) -> Tensor:
    """x of [rows * (active + shared), width]; out bf16 [rows * (active + shared), outputs], not yet weighted."""
    return _experts(3, x, weight, out, routes, routes.item_places, shape)


def _experts(kind: int, x: RoundedRows, weight: Tiles, out: Out, routes: Routes, rows: Tensor, shape: Shape | None) -> Out:
    assert x.codes.shape[1] == weight.width
    run, shared, shape = kernel(kind, weight, rows.shape[1], items=1, shape=shape)
    to, scales = (out, None) if isinstance(out, Tensor) else out
    run(
        (driver.num_processors(),), shape.threads, driver.rows_map(weight.data, shape.tiles), x.codes, x.scales, None, to, scales,
        routes.num_items, routes.item_expert, rows, routes.item_places, to.stride(0), 0, x.codes.stride(0), weight.num_tiles,
        1, weight.tile_blocks, 0, shared_bytes=shared,
    )  # fmt: skip
    return out
