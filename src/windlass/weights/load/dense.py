"""Parts of matrices to one plain tensor, a bounded slice at a time, each straight to its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from windlass.core.ports import ByteStore, TensorStore
from windlass.formats.dtypes import torch_dtype
from windlass.weights.load.prefetch import DEVICE_SLICE_BYTES, DEVICE_WORKERS, SLICE_BYTES, ahead
from windlass.weights.tensors.readers import first_row, kept_columns, picked, reader, runs
from windlass.weights.tensors.shards import Part

Job = Callable[[], None]
Block = tuple[Tensor, Tensor]
"""Where it goes, and what goes there."""


def load_dense(store: TensorStore, rows_of: Sequence[Sequence[Part]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[len(rows_of), out, in]: for each expert (or for the one matrix there is) its parts below each other."""
    first = rows_of[0]
    out = torch.empty(len(rows_of), sum(part.num_rows for part in first), first[0].num_in, dtype=dtype, device=device)
    jobs: list[Callable[[], Block | None]] = []
    for expert, parts in enumerate(rows_of):
        row = 0
        for part in parts:
            jobs += _jobs(store, part, out[expert, row : row + part.num_rows])
            row += part.num_rows
    if device.type == "cuda":
        jobs = [_pinned(job) for job in jobs]
    for block in ahead(jobs, 1 if device.type == "cpu" else DEVICE_WORKERS):
        if block is not None:
            block[0].copy_(block[1], non_blocking=True)
    return out


def _pinned(job: Callable[[], Block | None]) -> Callable[[], Block | None]:
    """Where a GPU copies from without the processor's help."""

    def pinned() -> Block | None:
        block = job()
        return None if block is None else (block[0], block[1].contiguous().pin_memory())

    return pinned


def load_vector(store: TensorStore, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> Tensor:
    read = [reader(store, part.ours, part.place)(*part.rows).reshape(-1).to(dtype) for part in parts]
    found = torch.cat(read) if len(read) > 1 else read[0].clone()
    return found.to(device)


def _jobs(store: TensorStore, part: Part, target: Tensor) -> Iterator[Callable[[], Block | None]]:
    if part.place.transposed:
        return _transposed(store, part, target)
    if _is_plain(store, part, target):
        return _in_place(store, part, target)
    return _by_rows(store, part, target)


def slice_rows(part: Part, target: Tensor) -> int:
    size = SLICE_BYTES if target.device.type == "cpu" else DEVICE_SLICE_BYTES
    return max(1, size // (part.ours.shape[-1] * 4))


def _by_rows(store: TensorStore, part: Part, target: Tensor) -> Iterator[Callable[[], Block]]:
    read, (first, last), (left, right) = reader(store, part.ours, part.place), part.rows, part.columns
    step = slice_rows(part, target)
    for start in range(first, last, step):
        stop = min(start + step, last)

        def job(start: int = start, stop: int = stop) -> Block:
            return target[start - first : stop - first], read(start, stop)[:, left:right]

        yield job


def _transposed(store: TensorStore, part: Part, target: Tensor) -> Iterator[Callable[[], Block]]:
    """Stored rows are our inputs: a slab of them is a few columns of the target."""
    name, rows, (left, right) = part.place.name, picked(part.ours, part.place), part.columns
    begin = first_row(part.ours, part.place)
    slab = max(1, SLICE_BYTES // (store.shape(name)[-1] * 4))
    for start in range(left, right, slab):
        stop = min(start + slab, right)

        def job(start: int = start, stop: int = stop) -> Block:
            values = kept_columns(store.read(name, begin + start, begin + stop), rows, *part.rows)
            return target[:, start - left : stop - left], values.t()

        yield job


def _is_plain(store: TensorStore, part: Part, target: Tensor) -> bool:
    """Whole rows, in memory as in the file: they are read to where they stay."""
    return (
        hasattr(store, "read_into")
        and target.device.type == "cpu"
        and part.whole_rows
        and not part.place.packed
        and not part.place.source.encoding
        and store.dtype(part.place.name) not in ("F8_E4M3", "I8")
        and torch_dtype(store.dtype(part.place.name)) is target.dtype
    )


def _in_place(store: TensorStore, part: Part, target: Tensor) -> Iterator[Callable[[], None]]:
    rows, begin, row_bytes = picked(part.ours, part.place), first_row(part.ours, part.place), target.shape[-1] * target.itemsize
    bytes_of = cast(ByteStore, store)

    def job() -> None:
        whole = target.view(torch.uint8).numpy().reshape(-1).data
        for ours, stored, count in runs(rows, *part.rows):
            offset = (ours - part.rows[0]) * row_bytes
            bytes_of.read_into(part.place.name, (begin + stored) * row_bytes, whole[offset : offset + count * row_bytes])

    yield job
