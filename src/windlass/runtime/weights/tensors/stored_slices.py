"""Which slices of the stored tensors (weight, scales, zero points) must be present to load a shard. Pure.

The counterpart of `readers`, `load.dense` and `load.quantized`: they read whole rows, but use no columns other than these.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from windlass.core.constants import FP8_BLOCK, MXFP4_BLOCK
from windlass.core.place import Interval
from windlass.core.ports import TensorStore
from windlass.core.rule import StridedRows
from windlass.model.formats.gguf.header import TYPES
from windlass.runtime.weights.tensors.packed import ROWS_PER_WORD
from windlass.runtime.weights.tensors.readers import SHORT_RUN_ROWS, first_row, row_selection, runs
from windlass.runtime.weights.tensors.shards import TensorShard
from windlass.runtime.weights.tensors.slices import Slice

BLOCKS = {kind.name: kind for kind in TYPES.values()}
"""Block types by name; blocks are never split."""


def stored_slices(store: TensorStore, shard: TensorShard) -> list[Slice]:
    """May overlap where shards are interleaved."""
    if len(shard.tensor.shape) == 1:
        return list(_vector(store, shard))
    if shard.location.transposed:
        return list(_transposed(shard))
    return [one for rows in _stored_rows(shard) for one in _matrix(store, shard, rows)]


def _vector(store: TensorStore, shard: TensorShard) -> Iterator[Slice]:
    name, rows = shard.location.name, row_selection(shard.tensor, shard.location)
    if shard.location.stacked:  # one row per expert
        expert = shard.tensor.expert or 0
        columns = shard.rows if rows is None else (0, store.shape(name)[-1])
        yield Slice(name=name, rows=(expert, expert + 1), columns=columns)
        return
    width = 1 if len(store.shape(name)) < 2 else store.shape(name)[-1]
    for first, last in _runs(rows, shard.rows):
        yield Slice(name=name, rows=(first, last), columns=(0, width))


def _transposed(shard: TensorShard) -> Iterator[Slice]:
    """Our inputs are stored rows, our rows stored columns."""
    begin, rows = first_row(shard.tensor, shard.location), row_selection(shard.tensor, shard.location)
    held = begin + shard.columns[0], begin + shard.columns[1]
    for columns in _runs(rows, shard.rows):
        yield Slice(name=shard.location.name, rows=held, columns=columns)


def _stored_rows(shard: TensorShard) -> Iterator[Interval]:
    begin = first_row(shard.tensor, shard.location)
    for first, last in _runs(row_selection(shard.tensor, shard.location), shard.rows):
        yield begin + first, begin + last


def _runs(rows: StridedRows | None, held: Interval) -> Iterator[Interval]:
    """Contiguous runs of stored rows; short runs are read together with the rows between them."""
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
        for suffix, width in (("_blocks", num_in // 2), ("_scales", num_in // MXFP4_BLOCK)):
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
    """Scales of fp8 and int8 weights: per 128 x 128 block, per row or per tensor."""
    names, blocks, one = store.names(), f"{name}_scale_inv", f"{name}_scale"
    if store.dtype(name) not in ("F8_E4M3", "I8"):
        return
    if blocks in names:
        yield Slice(name=blocks, rows=_divided(rows, FP8_BLOCK), columns=_divided(columns, FP8_BLOCK))
    elif one in names:
        shape = store.shape(one)
        yield Slice(name=one, rows=rows if prod(shape) > 1 else (0, 1), columns=(0, 1))


def _scaled(columns: Interval, num_in: int, width: int) -> Interval:
    """Converts an interval of `num_in` inputs to columns of a tensor with `width` columns."""
    return columns[0] * width // num_in, -(-columns[1] * width // num_in)


def _divided(interval: Interval, size: int) -> Interval:
    return interval[0] // size, -(-interval[1] // size)


def _whole_blocks(store: TensorStore, name: str, columns: Interval, num_in: int) -> Interval:
    block_type = getattr(store, "block_type", None)
    size = 1 if block_type is None else BLOCKS[block_type(name)].elements
    return columns[0] // size * size, min(-(-columns[1] // size) * size, num_in)
