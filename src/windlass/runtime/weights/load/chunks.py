"""What of a checkpoint's files becomes which tiles, a buffer at a time (kernels.program.loader). Reads nothing.

A buffer holds whole matrices (experts) where they fit, else some tiles of one; codes first, then scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from windlass.core.fused import TILE_ROWS
from windlass.core.model import Frozen
from windlass.runtime.kernels.cuda.layout import Tiles
from windlass.runtime.kernels.program.loader import Chunk, Read, Repack
from windlass.runtime.weights.tensors.shards import TensorShard

Find = Callable[[str], tuple[int, int]]
"""A stored tensor -> the number of its file, and where it begins there."""
Span = tuple[int, int]
"""Rows first..last of a matrix."""


class RowBytes(Frozen):
    codes: int
    scales: int

    @property
    def both(self) -> int:
        return self.codes + self.scales


def tile_chunks(find: Find, rows_of: Sequence[Sequence[TensorShard]], tiles: Tiles, slot_bytes: int) -> Iterator[Chunk]:
    """For each matrix its shards, concatenated along the output: whole rows of the packed layout."""
    row = RowBytes(codes=tiles.inputs // 2, scales=tiles.inputs // tiles.group * 2)
    at_once = slot_bytes // (tiles.rows * row.both)
    if at_once:
        spans = [_spans(tiles, 0, tiles.num_tiles)] * at_once
        for first in range(0, len(rows_of), at_once):
            some = rows_of[first : first + at_once]
            yield _chunk(find, list(zip(some, spans, strict=False)), tiles, row, (first, 0))
        return
    step = slot_bytes // (TILE_ROWS * row.both)
    assert step, "a buffer holds at least a tile"
    for number, shards in enumerate(rows_of):
        for tile in range(0, tiles.num_tiles, step):
            spans_of = _spans(tiles, tile, min(tile + step, tiles.num_tiles))
            yield _chunk(find, [(shards, spans_of)], tiles, row, (number, tile))


def _spans(tiles: Tiles, first: int, last: int) -> list[Span]:
    """The rows of tiles first..last: half of a pair's are gate's, half up's."""
    if not tiles.paired:
        return [(first * TILE_ROWS, last * TILE_ROWS)]
    half, middle = TILE_ROWS // 2, tiles.rows // 2
    return [(first * half, last * half), (middle + first * half, middle + last * half)]


def _chunk(
    find: Find,
    matrices: Sequence[tuple[Sequence[TensorShard], list[Span]]],
    tiles: Tiles,
    row: RowBytes,
    place: tuple[int, int],
) -> Chunk:
    """`place`: its first matrix and tile."""
    rows = sum(last - first for first, last in matrices[0][1])
    scales_at = len(matrices) * rows * row.codes
    reads: list[Read] = []
    at = 0
    for shards, spans in matrices:
        for span in spans:
            for shard, first, count in _stretches(shards, span):
                name = shard.location.name
                reads.append(_read(find(f"{name}_packed"), first, count, row.codes, at * row.codes))
                reads.append(_read(find(f"{name}_scale"), first, count, row.scales, scales_at + at * row.scales))
                at += count
    matrix, tile = place
    target = tiles.data.data_ptr() + (matrix * tiles.num_tiles + tile) * tiles.tile_bytes
    blocks = len(matrices) * rows // TILE_ROWS * tiles.tile_blocks
    how = Repack(scales_at, rows, tiles.inputs, tiles.group, tiles.tile_blocks, tiles.paired, blocks)
    return Chunk(reads, len(matrices) * rows * row.both, target, how)


def _stretches(shards: Sequence[TensorShard], span: Span) -> Iterator[tuple[TensorShard, int, int]]:
    """Of the concatenated shards' rows, each shard's: its first stored row, and how many."""
    begin = 0
    for shard in shards:
        first, last = max(span[0], begin), min(span[1], begin + shard.num_rows)
        if first < last:
            yield shard, shard.rows[0] + first - begin, last - first
        begin += shard.num_rows


def _read(place: tuple[int, int], first: int, count: int, row_bytes: int, to: int) -> Read:
    return Read(place[0], place[1] + first * row_bytes, count * row_bytes, to)


def plain_chunks(place: tuple[int, int], num_bytes: int, target: int, slot_bytes: int) -> Iterator[Chunk]:
    """Bytes as they are stored. `place`: the file's number, and where they begin."""
    for at in range(0, num_bytes, slot_bytes):
        size = min(slot_bytes, num_bytes - at)
        yield Chunk([Read(place[0], place[1] + at, size, 0)], size, target + at)
