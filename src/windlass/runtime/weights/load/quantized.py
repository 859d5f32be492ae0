"""Loads shards of quantized matrices: codes and scales as they are stored, a bounded slice at a time. Nothing is requantized."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from windlass.core.constants import FP8_BLOCK
from windlass.core.ports import BlockStore, QuantizingStore, TensorStore
from windlass.model.formats.dtypes import torch_dtype
from windlass.runtime.kernels.packing import repack
from windlass.runtime.kernels.packing.packed_rows import PackedRows
from windlass.runtime.kernels.packing.panels import PANEL_ROWS, Panels
from windlass.runtime.weights.load.coded_rows import CodedRows
from windlass.runtime.weights.load.prefetch import DEVICE_SLICE_BYTES, DEVICE_WORKERS, SLICE_BYTES, prefetch
from windlass.runtime.weights.load.stacks import expert_bytes, read_experts
from windlass.runtime.weights.tensors.packed import packed_layout, packed_rows
from windlass.runtime.weights.tensors.readers import SHORT_RUN_ROWS, first_row, row_selection, runs
from windlass.runtime.weights.tensors.shards import TensorShard
from windlass.runtime.weights.tensors.storage_format import CodeFormat, StorageFormat, storage_format

ReadCodes = Callable[[int, int], CodedRows]
Job = Callable[[], tuple[int | None, int, CodedRows]]
"""-> expert, first row, rows."""


def packed_bytes(codes: CodeFormat, num_out: int, num_in: int, device: torch.device) -> int:
    """Memory of a matrix in panels, or in rows on a GPU: as `load_packed` makes it."""
    shape = (codes.kind, num_out, num_in, codes.local_group(num_in))
    if device.type != "cpu":
        return PackedRows.allocate(*shape, scale_dtype=torch_dtype(codes.scale), device="meta").num_bytes
    nothing = torch.empty(0, dtype=torch.uint8)
    return Panels(shape[0], (num_out, num_in), shape[3], torch_dtype(codes.scale), nothing).expert_bytes


def load_packed(
    store: TensorStore, rows_of: Sequence[Sequence[TensorShard]], codes: CodeFormat, num_experts: int, device: torch.device
) -> Panels | PackedRows:
    """For each expert (or for a single matrix, `num_experts` 0) its shards, concatenated along the output: panels on a CPU, rows on a GPU."""
    first = rows_of[0]
    num_out, num_in = sum(shard.num_rows for shard in first), first[0].num_in
    shape = (codes.kind, num_out, num_in, codes.local_group(num_in), num_experts, torch_dtype(codes.scale))
    made = Panels.allocate(*shape) if device.type == "cpu" else PackedRows.allocate(*shape, device=device)
    if isinstance(made, PackedRows) and fill_experts(store, rows_of, codes, made):
        return made
    size, workers = (SLICE_BYTES, 1) if device.type == "cpu" else (DEVICE_SLICE_BYTES, DEVICE_WORKERS)
    jobs = [
        job for expert, shards in enumerate(rows_of) for job in coded_jobs(store, shards, expert if num_experts else None, size)
    ]
    for expert, row, rows in prefetch(jobs, workers):
        if rows.scale is None:
            made.put_blocks(row, rows.codes, expert)
        else:
            made.put(row, rows.codes, rows.scale, rows.offset, expert)
    return made


def fill_experts(store: TensorStore, rows_of: Sequence[Sequence[TensorShard]], codes: CodeFormat, made: PackedRows) -> bool:
    """Many experts at a time; False where they are to be read one by one."""
    together = expert_bytes(store, rows_of, codes, DEVICE_SLICE_BYTES)
    if together is None:
        return False
    for first, rows in read_experts(store, rows_of, together, DEVICE_SLICE_BYTES, made.device):
        assert rows.scale is not None
        made.put_experts(first, rows.codes, rows.scale)
    return True


def coded_jobs(
    store: TensorStore, shards: Sequence[TensorShard], expert: int | None, slice_bytes: int = SLICE_BYTES
) -> Iterator[Job]:
    """Jobs that read slices of the concatenated shards, each with its first row."""
    row = 0
    for shard in shards:
        yield from _jobs(store, shard, row, expert, slice_bytes)
        row += shard.num_rows


def _jobs(store: TensorStore, shard: TensorShard, row: int, expert: int | None, slice_bytes: int) -> Iterator[Job]:
    read, (first, last) = coded_columns(store, shard), shard.rows
    num_in = shard.tensor.shape[1]
    step = max(1, slice_bytes // num_in // PANEL_ROWS) * PANEL_ROWS
    for start in range(first, last, step):
        stop = min(start + step, last)

        def job(start: int = start, stop: int = stop) -> tuple[int | None, int, CodedRows]:
            return expert, row + start - first, read(start, stop)

        yield job


def coded_columns(store: TensorStore, shard: TensorShard) -> ReadCodes:
    """Rows of ours start..stop, this rank's inputs."""
    if hasattr(store, "coded"):
        quantizing = cast(QuantizingStore, store)
        return lambda start, stop: CodedRows(*quantizing.coded(shard, start, stop))
    read = coded_reader(store, shard)
    return lambda start, stop: read(start, stop).columns(*shard.columns, shard.tensor.shape[1])


def coded_reader(store: TensorStore, shard: TensorShard) -> ReadCodes:
    """PackedRows of ours start..stop, all inputs."""
    base = _stored_rows(store, shard, storage_format(store, shard.tensor, shard.location))
    first, rows = first_row(shard.tensor, shard.location), row_selection(shard.tensor, shard.location)

    def read(start: int, stop: int) -> CodedRows:
        stretches = list(runs(rows, start, stop))
        if rows is None or len(stretches) == 1 or rows.block >= SHORT_RUN_ROWS:
            return _joined([base(first + stored, first + stored + count) for _, stored, count in stretches])
        lowest, highest = rows.stored(start), rows.stored(stop - 1) + 1
        index = torch.tensor([rows.stored(row) - lowest for row in range(start, stop)])
        return base(first + lowest, first + highest).select(index)

    return read


def _joined(parts: list[CodedRows]) -> CodedRows:
    if len(parts) == 1:
        return parts[0]
    scales = [rows.scale for rows in parts if rows.scale is not None]
    offsets = [rows.offset for rows in parts if rows.offset is not None]
    codes = torch.cat([rows.codes for rows in parts])
    return CodedRows(codes, torch.cat(scales) if scales else None, torch.cat(offsets) if offsets else None)


# --- one reader per storage format


def _stored_rows(store: TensorStore, shard: TensorShard, form: StorageFormat) -> ReadCodes:
    name = shard.location.name
    if shard.location.packed:
        read = packed_rows(store, name, packed_layout(store, name, shard.tensor.shape))
        return lambda start, stop: CodedRows(*read(start, stop))
    if form.name == "mxfp4":
        return lambda start, stop: _mxfp4(store, name, start, stop)
    if form.name in ("F8_E4M3", "I8"):
        return lambda start, stop: _eight_bits(store, name, start, stop)
    return lambda start, stop: _ggml(cast(BlockStore, store), name, start, stop)


def _ggml(store: BlockStore, name: str, start: int, stop: int) -> CodedRows:
    _, data = store.raw_blocks(name, start, stop)
    return CodedRows(torch.frombuffer(data, dtype=torch.uint8).view(stop - start, -1))


def _mxfp4(store: TensorStore, name: str, start: int, stop: int) -> CodedRows:
    scales = store.read(f"{name}_scales", start, stop)
    per_row = scales.shape[1]
    blocks = store.read(f"{name}_blocks", start * per_row, stop * per_row)
    return CodedRows(*repack.mxfp4(blocks.view(stop - start, per_row, -1), scales))


def _eight_bits(store: TensorStore, name: str, start: int, stop: int) -> CodedRows:
    codes = store.read(name, start, stop)
    if codes.dtype is torch.int8:  # flipping the sign bit of two's complement adds 128
        codes = (codes.view(torch.uint8) ^ 128).view(torch.int32)
    return CodedRows(codes, _row_scales(store, name, start, stop))


def _row_scales(store: TensorStore, name: str, start: int, stop: int) -> Tensor:
    """fp32 [rows, groups], from scales per row, per tensor or per 128 x 128 block."""
    if f"{name}_scale_inv" in store.names():
        first, last = start // FP8_BLOCK, -(-stop // FP8_BLOCK)
        every = store.read(f"{name}_scale_inv", first, last).float().repeat_interleave(FP8_BLOCK, dim=0)
        return every[start - first * FP8_BLOCK : stop - first * FP8_BLOCK].contiguous()
    scale = f"{name}_scale"
    rows = store.shape(scale)[0] if store.shape(scale) else 1
    found = store.read(scale, start, stop) if rows > 1 else store.read(scale, 0, 1)
    return found.float().reshape(-1, 1).expand(stop - start, 1).contiguous()
