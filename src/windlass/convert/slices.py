"""The work, cut into slices of rows small enough for the memory that was allowed. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.convert.outputs import ConvertedTensor
from windlass.core.model import Frozen
from windlass.units import MIB

ROW_MULTIPLE = 32
"""Slices begin on a multiple of this, so that zero points packed along the output are never shared by two of them."""
LARGEST_BYTES = 4 * MIB
"""Larger ones are no faster: memory that is used again stays in the caches, and 16 MiB took half as long again."""
SMALLEST_BYTES = MIB
COPIES = 20
"""What one worker may hold, in slices of 16 bits: fp32 rows are two, what rounding them lost is computed in fp64, three times four;
the rest is what the heap keeps."""


class RowSlice(Frozen):
    output: int
    """Index into the outputs."""
    start: int
    stop: int

    @property
    def key(self) -> str:
        return f"{self.output}:{self.start}"


def affordable_jobs(outputs: tuple[ConvertedTensor, ...], max_memory_bytes: int, jobs: int) -> int:
    """Workers of those that were asked for: slices cannot be smaller than some, so little memory makes workers fewer."""
    smallest = max(SMALLEST_BYTES, ROW_MULTIPLE * max((output.row_bytes for output in outputs), default=0))
    return max(1, min(jobs, max_memory_bytes // (smallest * COPIES)))


def slice_bytes_for(max_memory_bytes: int, jobs: int) -> int:
    """How much of the source a worker takes at a time."""
    return max(SMALLEST_BYTES, min(LARGEST_BYTES, max_memory_bytes // (jobs * COPIES)))


def row_slices(outputs: tuple[ConvertedTensor, ...], slice_bytes: int) -> Iterator[RowSlice]:
    for index, output in enumerate(outputs):
        if len(output.shape) == 1:
            yield RowSlice(output=index, start=0, stop=output.shape[0])
            continue
        rows = output.shape[0]
        step = max(slice_bytes // output.row_bytes // ROW_MULTIPLE, 1) * ROW_MULTIPLE
        for start in range(0, rows, step):
            yield RowSlice(output=index, start=start, stop=min(start + step, rows))
