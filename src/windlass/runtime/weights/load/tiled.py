"""Loads shards of 4-bit matrices into tiles on a GPU (kernels.cuda.layout); the GPU rearranges stored codes and scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from windlass.core.fused import TILE_ROWS
from windlass.core.ports import TensorStore
from windlass.runtime.kernels.cuda.layout import TileLoader, Tiles, empty, repack
from windlass.runtime.weights.load.background import BackgroundLoad
from windlass.runtime.weights.load.coded_rows import CodedRows
from windlass.runtime.weights.load.prefetch import DEVICE_SLICE_BYTES, DEVICE_WORKERS, prefetch
from windlass.runtime.weights.load.quantized import Job, coded_jobs
from windlass.runtime.weights.load.stacks import expert_bytes, read_experts
from windlass.runtime.weights.tensors.shards import TensorShard
from windlass.runtime.weights.tensors.storage_format import CodeFormat

GROUPS = (32, 64, 128)


def can_tile(codes: CodeFormat | None, num_out: int, num_in: int) -> bool:
    """Symmetric int4 with a supported group size and bf16 scales."""
    if codes is None or codes.kind != "int4" or codes.scale != "BF16":
        return False
    group = codes.local_group(num_in)
    return group in GROUPS and num_in % group == 0 and num_out % TILE_ROWS == 0


def is_gate_up(names: Sequence[str]) -> bool:
    """Gate stacked on up: their rows are interleaved, so that a tile has both values of each SwiGLU output."""
    return len(names) == 2 and "gate" in names[0] and "up" in names[1]


def load_tiles(
    store: TensorStore,
    rows_of: Sequence[Sequence[TensorShard]],
    codes: CodeFormat,
    out: Tiles,
    background: BackgroundLoad | None = None,
) -> Tiles:
    """For each expert (or for a single matrix) its shards, concatenated along the output."""
    if background is not None and background.put_tiles(store, rows_of, out):
        return out
    together = expert_bytes(store, rows_of, codes, DEVICE_SLICE_BYTES)
    if together is not None:
        for number, rows in read_experts(store, rows_of, together, DEVICE_SLICE_BYTES, out.data.device):
            assert rows.scale is not None
            repack(rows.codes, rows.scale, paired=out.paired, out=out, first=number)
        return out
    filling = TileLoader(out)
    jobs = [job for number, shards in enumerate(rows_of) for job in coded_jobs(store, shards, number, DEVICE_SLICE_BYTES)]
    if out.data.is_cuda:
        jobs = [_pinned(job) for job in jobs]
    for number, row, rows in prefetch(jobs, DEVICE_WORKERS):
        assert number is not None and rows.scale is not None
        filling.put(row, rows.codes, rows.scale, number)
    return out


def empty_tiles(shards: Sequence[TensorShard], codes: CodeFormat, count: int, *, paired: bool, device: torch.device) -> Tiles:
    """Of so many matrices like these shards, concatenated along the output."""
    num_out, num_in = sum(shard.num_rows for shard in shards), shards[0].num_in
    return empty(count, num_out, num_in, codes.local_group(num_in), paired=paired, device=device)


def _pinned(job: Job) -> Job:
    def pinned() -> tuple[int | None, int, CodedRows]:
        number, row, rows = job()
        return number, row, rows.pinned()

    return pinned
