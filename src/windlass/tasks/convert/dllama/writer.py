"""Writes a Distributed Llama `.m` file: slices of rows are read and quantized on several threads and written in order.

Memory use is that of the slices in flight, whatever the model size. The file has a temporary name until it is complete.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from io import BufferedWriter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from windlass.core.model import Frozen, ModelSpec
from windlass.errors import BadCheckpoint, BadInput
from windlass.model.families import describe
from windlass.model.families.dllama.header import header_values
from windlass.model.families.dllama.names import notes
from windlass.model.formats.dllama.blocks import encode
from windlass.model.formats.dllama.file import WeightType, header_bytes, to_pairs, weight_type
from windlass.runtime.weights.stores.dllama import PlacedTensor, place_tensors

ReadRows = Callable[[str, int, int], torch.Tensor]
"""`TensorStore.read`: rows start..stop of a tensor under its Hugging Face name, experts one by one, in any float type."""

SLICE_ELEMENTS = 2**20
"""Elements read at a time: 4 MiB as float32."""


class WrittenModel(Frozen):
    num_bytes: int
    num_tensors: int
    notes: tuple[str, ...]
    """Warnings for the user."""


class FileSlice(Frozen):
    """Rows of one tensor, written together; whole heads where rows are permuted."""

    placed: PlacedTensor
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * self.placed.row_bytes


def file_bytes(config: dict[str, Any], weights: str = "q40") -> int:
    """Size of the file that `write_model` writes."""
    header, placed = _layout(config, describe(config), weight_type(weights))
    return len(header) + sum(found.num_bytes for found in placed)


def write_model(
    path: Path,
    config: dict[str, Any],
    read: ReadRows,
    weights: str = "q40",
    *,
    jobs: int = 2,
    slice_elements: int = SLICE_ELEMENTS,
    progress: Callable[[str, int], None] | None = None,
) -> WrittenModel:
    """`progress` is called with the tensor name and bytes of each slice written.

    `jobs` slices are quantized at once and as many wait to be written: about 2 * jobs * slice_elements * 12 bytes of memory.
    """
    spec, kind = describe(config), weight_type(weights)
    header, placed = _layout(config, spec, kind)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as stream:
            stream.write(header)
            _write_slices(stream, _slices(placed, slice_elements), read, jobs, progress)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return WrittenModel(num_bytes=placed[-1].offset + placed[-1].num_bytes, num_tensors=len(placed), notes=_notes(spec, kind))


def _layout(config: dict[str, Any], spec: ModelSpec, kind: WeightType) -> tuple[bytes, list[PlacedTensor]]:
    values = header_values(spec, config)
    header = header_bytes(values | {"weights_float_type": kind.value})
    return header, list(place_tensors(spec, kind, len(header)))


def _notes(spec: ModelSpec, kind: WeightType) -> tuple[str, ...]:
    if kind in (WeightType.F16, WeightType.Q80):
        return (*notes(spec), f"stock Distributed Llama runs only q40 and f32 files; this one is {kind.name.lower()}")
    return notes(spec)


def _slices(placed: list[PlacedTensor], slice_elements: int) -> Iterator[FileSlice]:
    for found in placed:
        unit = found.tensor.head_dim or 1
        step = max(slice_elements // (found.width * unit), 1) * unit
        for start in range(0, found.num_rows, step):
            yield FileSlice(placed=found, start=start, stop=min(start + step, found.num_rows))


def _write_slices(
    stream: BufferedWriter, slices: Iterator[FileSlice], read: ReadRows, jobs: int, progress: Callable[[str, int], None] | None
) -> None:
    threads = torch.get_num_threads()
    pending: deque[tuple[FileSlice, Future[np.ndarray]]] = deque()
    # One core per slice: torch's intra-op threads would wait for the slowest core on a busy machine.
    pool = ThreadPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,))
    try:
        for part in slices:
            pending.append((part, pool.submit(_encode, part, read)))
            if len(pending) >= 2 * jobs:
                _write_next(stream, pending, progress)
        while pending:
            _write_next(stream, pending, progress)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)


def _write_next(
    stream: BufferedWriter, pending: deque[tuple[FileSlice, Future[np.ndarray]]], progress: Callable[[str, int], None] | None
) -> None:
    part, future = pending.popleft()
    stream.write(future.result().data)
    if progress is not None:
        progress(part.placed.tensor.name, part.num_bytes)


def _encode(part: FileSlice, read: ReadRows) -> np.ndarray:
    tensor = part.placed.tensor
    is_vector = len(tensor.shape) == 1
    start, stop = (0, tensor.shape[0]) if is_vector else (part.start, part.stop)
    rows = read(tensor.name, start, stop)
    expected = (stop - start, *tensor.shape[1:])
    if tuple(rows.shape) != expected:
        raise BadCheckpoint(
            f"rows {start}..{stop} have shape {tuple(rows.shape)}; the config says {expected}", tensor=tensor.name
        )
    if tensor.head_dim:
        rows = to_pairs(rows, tensor.head_dim)
    try:
        return encode(rows, part.placed.kind)
    except BadInput as error:
        raise BadCheckpoint(f"rows {start}..{stop}: {error}", tensor=tensor.name) from None
