"""How products of many rows with 4-bit weights in integer arithmetic (runtime/kernels/cuda/int8.py) are cut into the work of thread blocks."""

from __future__ import annotations

import functools
from typing import NamedTuple

from windlass.core.fused import TILE_ROWS


class Shape(NamedTuple):
    """Of a thread block's work, see int8.cu."""

    warpgroups: int
    split: int
    """Columns of the first half of a product, 0 for one whole."""
    fragments: int

    @property
    def tiles(self) -> int:
        return self.warpgroups * 8

    @property
    def threads(self) -> int:
        return self.warpgroups * 128 + 128


SHAPES = {
    16: Shape(3, 0, 2),
    32: Shape(3, 0, 2),
    48: Shape(2, 0, 2),
    64: Shape(2, 0, 2),
    80: Shape(2, 32, 2),
    128: Shape(2, 64, 1),
}
"""For items of experts, by their rows of x; the fastest of those tried (docs/reference/cuda-notes.md)."""
ITEM_SECONDS = {16: 0.51e-6, 32: 0.57e-6, 48: 0.58e-6, 64: 0.7e-6, 80: 0.775e-6}
"""Of a block of inputs of 256 rows of weights, by the rows of an item; a unit has an overhead of `ITEM_BLOCKS` such blocks. Measured with the
experts of GLM-4.5-Air and 128 to 2,048 rows (docs/reference/cuda-notes.md, 30 to 32 and 38)."""
ITEM_BLOCKS = 1.7


class UnitKind(NamedTuple):
    """A way to cut a product of all rows into units."""

    rows: int
    """Of x."""
    shape: Shape
    seconds: float
    """Of a block of inputs."""


UNIT_KINDS = (
    UnitKind(16, Shape(2, 0, 2), 0.54e-6),
    UnitKind(32, Shape(2, 0, 2), 0.555e-6),
    UnitKind(48, Shape(2, 0, 2), 0.58e-6),
    UnitKind(64, Shape(2, 0, 2), 0.69e-6),
    UnitKind(80, Shape(2, 32, 2), 0.79e-6),
    UnitKind(128, Shape(2, 64, 1), 1.25e-6),
)
"""Measured in products of 16 to 2,048 rows."""
TILES = 16
"""Of weights, in each of these."""
HAND_ON_SECONDS = 8e-6
"""To hand sums of a unit that is cut to the thread block that finishes it."""
PARTS_BYTES_PER_SECOND = 3.5e12
MOST_SLICES = 8


class Cut(NamedTuple):
    """How a product is cut into units: rows of x in each, the work of a thread block, and slices of the inputs."""

    rows: int
    shape: Shape
    slices: int
    seconds: float
    """Expected, without the launch."""


def item_rows(mean: float) -> int:
    """Rows of an item, for experts with so many rows on average: the fastest if all have two standard deviations more."""
    most = mean + 2 * mean**0.5
    return min(ITEM_SECONDS, key=lambda size: -(-most // size) * ITEM_SECONDS[size])


@functools.cache
def cut(rows: int, tiles: int, blocks: int, processors: int, most_slices: int = MOST_SLICES) -> Cut:
    """The fastest way to cut a product of so many rows of x. Asked for thousands of row counts before a server is ready.

    Thread blocks share units, so that all have as much to do. Where there are fewer units than thread blocks, several would wait for the one that
    adds up their sums: the next kernel adds slices of the inputs sooner."""
    groups, divisors = -(-tiles // TILES), [n for n in range(1, most_slices + 1) if blocks % n == 0]
    part_seconds = 2 * 4 * rows * tiles * TILE_ROWS / PARTS_BYTES_PER_SECOND
    best: Cut | None = None
    for kind in UNIT_KINDS:
        units = groups * -(-rows // kind.rows)
        slices = max(n for n in divisors if n == 1 or units * n <= processors) if units < processors else 1
        if slices > 1:
            took = blocks // slices * kind.seconds + slices * part_seconds
        else:
            took = units * blocks / processors * kind.seconds + (HAND_ON_SECONDS if units % processors else 0)
        if best is None or took < best.seconds:
            best = Cut(kind.rows, kind.shape, slices, took)
    assert best is not None
    return best
