"""Loads shards of matrices into one dense tensor, a bounded slice at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from windlass.core.ports import ByteStore, QuantizingStore, TensorStore
from windlass.model.formats.dtypes import torch_dtype
from windlass.runtime.weights.load.prefetch import DEVICE_SLICE_BYTES, DEVICE_WORKERS, SLICE_BYTES, prefetch
from windlass.runtime.weights.tensors.readers import first_row, reader, row_selection, runs, select_columns
from windlass.runtime.weights.tensors.shards import TensorShard

PINNED_BYTES = 2**23
"""A copy of less than this takes no longer from memory that is not pinned than pinning takes."""
Job = Callable[[], None]
Block = tuple[Tensor, Tensor]
"""(target, values)."""


def load_dense(store: TensorStore, rows_of: Sequence[Sequence[TensorShard]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[len(rows_of), out, in]: for each expert (or for a single matrix) its shards, concatenated along the output."""
    first = rows_of[0]
    out = torch.empty(len(rows_of), sum(shard.num_rows for shard in first), first[0].num_in, dtype=dtype, device=device)
    jobs: list[Callable[[], Block | None]] = []
    for expert, shards in enumerate(rows_of):
        row = 0
        for shard in shards:
            jobs += _jobs(store, shard, out[expert, row : row + shard.num_rows])
            row += shard.num_rows
    if device.type == "cuda":
        jobs = [_pinned(job) for job in jobs]
    for block in prefetch(jobs, 1 if device.type == "cpu" else DEVICE_WORKERS):
        if block is not None:
            block[0].copy_(block[1], non_blocking=True)
    return out


def _pinned(job: Callable[[], Block | None]) -> Callable[[], Block | None]:
    """In pinned memory, from which a GPU copies asynchronously, where that is worth allocating it: 6 ms each, measured with routers of 1 MiB."""

    def pinned() -> Block | None:
        block = job()
        if block is None or block[1].nbytes < PINNED_BYTES:
            return block
        return block[0], block[1].contiguous().pin_memory()

    return pinned


def load_vector(store: TensorStore, shards: Sequence[TensorShard], dtype: torch.dtype, device: torch.device) -> Tensor:
    read = [
        _rounded(store, shard, reader(store, shard.tensor, shard.location)(*shard.rows)).reshape(-1).to(dtype) for shard in shards
    ]
    found = torch.cat(read) if len(read) > 1 else read[0].clone()
    return found.to(device)


def _rounded(store: TensorStore, shard: TensorShard, values: Tensor) -> Tensor:
    """Of a checkpoint that is quantized while it loads: to the 16 bits in which conversion would keep it."""
    kept = getattr(store, "kept_dtype", None)
    return values if kept is None else values.to(torch_dtype(kept(shard.tensor.rule)))


def _jobs(store: TensorStore, shard: TensorShard, target: Tensor) -> Iterator[Callable[[], Block | None]]:
    if hasattr(store, "packed_as") and cast(QuantizingStore, store).packed_as(shard.tensor.rule) is not None:
        return _dequantized(cast(QuantizingStore, store), shard, target)
    if shard.location.transposed:
        return _transposed(store, shard, target)
    if _is_plain(store, shard, target):
        return _in_place(store, shard, target)
    return _by_rows(store, shard, target)


def slice_rows(shard: TensorShard, target: Tensor) -> int:
    size = SLICE_BYTES if target.device.type == "cpu" else DEVICE_SLICE_BYTES
    return max(1, size // (shard.tensor.shape[-1] * 4))


def _by_rows(store: TensorStore, shard: TensorShard, target: Tensor) -> Iterator[Callable[[], Block]]:
    read, (first, last), (left, right) = reader(store, shard.tensor, shard.location), shard.rows, shard.columns
    step = slice_rows(shard, target)
    for start in range(first, last, step):
        stop = min(start + step, last)

        def job(start: int = start, stop: int = stop) -> Block:
            return target[start - first : stop - first], read(start, stop)[:, left:right]

        yield job


def _dequantized(store: QuantizingStore, shard: TensorShard, target: Tensor) -> Iterator[Callable[[], Block]]:
    """As if it had been stored quantized."""
    (first, last), step = shard.rows, slice_rows(shard, target)
    for start in range(first, last, step):
        stop = min(start + step, last)

        def job(start: int = start, stop: int = stop) -> Block:
            return target[start - first : stop - first], store.dequantized(shard, start, stop)

        yield job


def _transposed(store: TensorStore, shard: TensorShard, target: Tensor) -> Iterator[Callable[[], Block]]:
    """Stored rows are our inputs: a slab of them fills some columns of the target."""
    name, rows, (left, right) = shard.location.name, row_selection(shard.tensor, shard.location), shard.columns
    begin = first_row(shard.tensor, shard.location)
    slab = max(1, SLICE_BYTES // (store.shape(name)[-1] * 4))
    for start in range(left, right, slab):
        stop = min(start + slab, right)

        def job(start: int = start, stop: int = stop) -> Block:
            values = select_columns(store.read(name, begin + start, begin + stop), rows, *shard.rows)
            return target[:, start - left : stop - left], values.t()

        yield job


def _is_plain(store: TensorStore, shard: TensorShard, target: Tensor) -> bool:
    """Whole rows stored in the target's dtype: they can be read straight into it."""
    return (
        hasattr(store, "read_into")
        and target.device.type == "cpu"
        and shard.whole_rows
        and not shard.location.packed
        and not shard.location.source.encoding
        and store.dtype(shard.location.name) not in ("F8_E4M3", "I8")
        and torch_dtype(store.dtype(shard.location.name)) is target.dtype
    )


def _in_place(store: TensorStore, shard: TensorShard, target: Tensor) -> Iterator[Callable[[], None]]:
    rows, begin, row_bytes = (
        row_selection(shard.tensor, shard.location),
        first_row(shard.tensor, shard.location),
        target.shape[-1] * target.itemsize,
    )
    bytes_of = cast(ByteStore, store)

    def job() -> None:
        whole = target.view(torch.uint8).numpy().reshape(-1).data
        for ours, stored, count in runs(rows, *shard.rows):
            offset = (ours - shard.rows[0]) * row_bytes
            bytes_of.read_into(shard.location.name, (begin + stored) * row_bytes, whole[offset : offset + count * row_bytes])

    yield job
