"""Reads packed experts of one layer, many at a time: a few large reads and one copy to the device instead of several per expert.

A buffer holds the codes of some experts, then their scales; an expert's shards lie one after another, as they are stacked. Neighbours in
a file are read in one go, wherever in the buffer they go (`PieceStore`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from windlass.core.model import Frozen
from windlass.core.ports import PieceStore, TensorStore
from windlass.model.formats.dtypes import torch_dtype
from windlass.runtime.weights.load.coded_rows import CodedRows
from windlass.runtime.weights.load.prefetch import DEVICE_WORKERS, prefetch
from windlass.runtime.weights.tensors.readers import row_selection
from windlass.runtime.weights.tensors.shards import TensorShard
from windlass.runtime.weights.tensors.storage_format import CodeFormat

Experts = Sequence[Sequence[TensorShard]]
"""For each expert its shards, concatenated along the output."""

WORD_BYTES = 4


class ExpertBytes(Frozen):
    """One expert in a buffer; rows have all stored inputs, of which a rank may hold some."""

    num_rows: int
    inputs: int
    words: int
    """Codes of a row, in 32-bit words."""
    groups: int
    """Scales of a row."""
    scale: str
    """Their dtype."""

    @property
    def code_row(self) -> int:
        return self.words * WORD_BYTES

    @property
    def scale_row(self) -> int:
        return self.groups * torch_dtype(self.scale).itemsize

    @property
    def num_bytes(self) -> int:
        return self.num_rows * (self.code_row + self.scale_row)

    def at_once(self, slice_bytes: int) -> int:
        """Experts to a buffer. A weight counts as a byte, as in slices of single matrices, so that as much memory is in flight."""
        return slice_bytes // (self.num_rows * self.inputs)


def expert_bytes(store: TensorStore, experts: Experts, codes: CodeFormat, slice_bytes: int) -> ExpertBytes | None:
    """None where experts are to be read one by one: another format or store, rows that lie apart, or a single matrix in many slices."""
    first = experts[0]
    packed = all(
        shard.location.packed and row_selection(shard.tensor, shard.location) is None for one in experts for shard in one
    )
    alike = all(shard.columns == first[0].columns and shard.tensor.shape[1] == first[0].tensor.shape[1] for shard in first)
    if len(experts) == 1 or not hasattr(store, "read_pieces") or codes.kind not in ("int4", "int8") or not (packed and alike):
        return None
    name = first[0].location.name
    words, groups = store.shape(f"{name}_packed")[-1], store.shape(f"{name}_scale")[-1]
    num_rows, inputs = sum(shard.num_rows for shard in first), first[0].tensor.shape[1]
    made = ExpertBytes(num_rows=num_rows, inputs=inputs, words=words, groups=groups, scale=codes.scale)
    return made if made.at_once(slice_bytes) else None


def read_experts(
    store: TensorStore, experts: Experts, of: ExpertBytes, slice_bytes: int, device: torch.device
) -> Iterator[tuple[int, CodedRows]]:
    """First expert, and its and its successors' codes [experts, rows, words] and scales [experts, rows, groups] on the device."""
    step = of.at_once(slice_bytes)
    jobs = [_job(cast(PieceStore, store), experts, start, step, of, device) for start in range(0, len(experts), step)]
    for start, raw in prefetch(jobs, DEVICE_WORKERS):
        rows = _cut(raw.to(device, non_blocking=True), of)
        yield start, rows.columns(*experts[0][0].columns, of.inputs)


def _job(
    store: PieceStore, experts: Experts, start: int, step: int, of: ExpertBytes, device: torch.device
) -> Callable[[], tuple[int, Tensor]]:
    def job() -> tuple[int, Tensor]:
        some = experts[start : start + step]
        # Pinned, so that the copy is asynchronous; PyTorch reuses the memory once it is done.
        raw = torch.empty(len(some) * of.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        store.read_pieces(list(_pieces(some, of, raw.numpy().data)))
        return start, raw

    return job


def _pieces(experts: Experts, of: ExpertBytes, buffer: memoryview) -> Iterator[tuple[str, int, memoryview]]:
    at, scales = 0, len(experts) * of.num_rows * of.code_row
    for shard in (shard for one in experts for shard in one):
        name, first, count = shard.location.name, shard.rows[0], shard.num_rows
        yield f"{name}_packed", first * of.code_row, buffer[at * of.code_row : (at + count) * of.code_row]
        yield f"{name}_scale", first * of.scale_row, buffer[scales + at * of.scale_row : scales + (at + count) * of.scale_row]
        at += count


def _cut(raw: Tensor, of: ExpertBytes) -> CodedRows:
    middle = raw.numel() // of.num_bytes * of.num_rows * of.code_row
    codes, scales = raw[:middle].view(torch.int32), raw[middle:].view(torch_dtype(of.scale))
    return CodedRows(codes.view(-1, of.num_rows, of.words), scales.view(-1, of.num_rows, of.groups))
