"""What of the stored tensors is read for a shard of one of ours: rows and columns of itself, of its scales, of its zero points. Pure.

The other side of `readers`, `dense` and `coded`, which read whole rows and keep their columns: of columns that are not named here they use nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from windlass.core.place import Interval
from windlass.core.ports import TensorStore
from windlass.core.rule import StridedRows
from windlass.formats.gguf.header import TYPES
from windlass.weights.tensors.packed import ROWS_PER_WORD
from windlass.weights.tensors.readers import SHORT_RUN_ROWS, first_row, row_selection, runs
from windlass.weights.tensors.shards import TensorShard
from windlass.weights.tensors.slices import Slice

FP8_BLOCK = 128
MXFP4_INPUTS = 32
BLOCKS = {kind.name: kind for kind in TYPES.values()}
"""Of formats that have them: so many elements in so many bytes, which are never cut."""


def stored_slices(store: TensorStore, shard: TensorShard) -> list[Slice]:
    """May overlap where rows of several shards lie between one another."""
    if len(shard.tensor.shape) == 1:
        return list(_vector(store, shard))
    if shard.location.transposed:
        return list(_transposed(shard))
    return [one for rows in _stored_rows(shard) for one in _matrix(store, shard, rows)]


def _vector(store: TensorStore, shard: TensorShard) -> Iterator[Slice]:
    name, rows = shard.location.name, row_selection(shard.tensor, shard.location)
    if shard.location.stacked:  # a row of each expert
        expert = shard.tensor.expert or 0
        columns = shard.rows if rows is None else (0, store.shape(name)[-1])
        yield Slice(name=name, rows=(expert, expert + 1), columns=columns)
        return
    width = 1 if len(store.shape(name)) < 2 else store.shape(name)[-1]
    for first, last in _runs(rows, shard.rows):
        yield Slice(name=name, rows=(first, last), columns=(0, width))


def _transposed(shard: TensorShard) -> Iterator[Slice]:
    """Our inputs are their rows, our rows their columns."""
    begin, rows = first_row(shard.tensor, shard.location), row_selection(shard.tensor, shard.location)
    held = begin + shard.columns[0], begin + shard.columns[1]
    for columns in _runs(rows, shard.rows):
        yield Slice(name=shard.location.name, rows=held, columns=columns)


def _stored_rows(shard: TensorShard) -> Iterator[Interval]:
    begin = first_row(shard.tensor, shard.location)
    for first, last in _runs(row_selection(shard.tensor, shard.location), shard.rows):
        yield begin + first, begin + last


def _runs(rows: StridedRows | None, held: Interval) -> Iterator[Interval]:
    """Stretches of stored rows; short ones are read with what lies between them."""
    if held[0] >= held[1]:
        return
    if rows is not None and rows.block < SHORT_RUN_ROWS:
        yield rows.stored(held[0]), rows.stored(held[1] - 1) + 1
        return
    for _, stored, count in runs(rows, *held):
        yield stored, stored + count


def _matrix(store: TensorStore, shard: TensorShard, rows: Interval) -> Iterator[Slice]:
    name, num_in = shard.location.name, shard.tensor.shape[1]
    if shard.location.packed:
        yield from _packed(store, name, rows, shard.columns, num_in)
        return
    if shard.location.source.encoding:
        for suffix, width in (("_blocks", num_in // 2), ("_scales", num_in // MXFP4_INPUTS)):
            yield Slice(name=name + suffix, rows=rows, columns=_scaled(shard.columns, num_in, width))
        return
    yield Slice(name=name, rows=rows, columns=_whole_blocks(store, name, shard.columns, num_in))
    yield from _scales(store, name, rows, shard.columns)


def _packed(store: TensorStore, name: str, rows: Interval, columns: Interval, num_in: int) -> Iterator[Slice]:
    for suffix in ("_packed", "_scale", "_zero_point"):
        if suffix == "_zero_point" and name + suffix not in store.names():
            continue
        width = store.shape(name + suffix)[-1]
        held = rows if suffix != "_zero_point" else (rows[0] // ROWS_PER_WORD, -(-rows[1] // ROWS_PER_WORD))
        yield Slice(name=name + suffix, rows=held, columns=_scaled(columns, num_in, width))


def _scales(store: TensorStore, name: str, rows: Interval, columns: Interval) -> Iterator[Slice]:
    """Of eight bits to a weight: for 128 x 128, for a row, or one for all."""
    names, blocks, one = store.names(), f"{name}_scale_inv", f"{name}_scale"
    if store.dtype(name) not in ("F8_E4M3", "I8"):
        return
    if blocks in names:
        yield Slice(name=blocks, rows=_divided(rows, FP8_BLOCK), columns=_divided(columns, FP8_BLOCK))
    elif one in names:
        shape = store.shape(one)
        yield Slice(name=one, rows=rows if prod(shape) > 1 else (0, 1), columns=(0, 1))


def _scaled(columns: Interval, num_in: int, width: int) -> Interval:
    """Inputs of `num_in` as columns of a tensor that has `width` for all of them."""
    return columns[0] * width // num_in, -(-columns[1] * width // num_in)


def _divided(interval: Interval, size: int) -> Interval:
    return interval[0] // size, -(-interval[1] // size)


def _whole_blocks(store: TensorStore, name: str, columns: Interval, num_in: int) -> Interval:
    block_type = getattr(store, "block_type", None)
    size = 1 if block_type is None else BLOCKS[block_type(name)].elements
    return columns[0] // size * size, min(-(-columns[1] // size) * size, num_in)
