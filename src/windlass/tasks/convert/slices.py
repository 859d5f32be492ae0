"""Splits the work into slices of rows that fit the memory limit. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from windlass.core.model import Frozen
from windlass.tasks.convert.outputs import ConvertedTensor
from windlass.units import MIB

ROW_MULTIPLE = 32
"""Slices start on a multiple of this, so that a word of zero points (packed along the output) is never shared by two slices."""
LARGEST_BYTES = 4 * MIB
"""Larger slices fall out of the caches: 16 MiB took 1.5 times as long."""
SMALLEST_BYTES = MIB
COPIES = 20
"""Peak memory of one worker, in 16-bit slices: fp32 rows take two, the error in fp64 three times four; the rest is heap overhead."""


class RowSlice(Frozen):
    """A unit of work: rows start..stop of one output."""

    output: int
    """Index into the outputs."""
    start: int
    stop: int

    @property
    def key(self) -> str:
        return f"{self.output}:{self.start}"


def affordable_jobs(outputs: tuple[ConvertedTensor, ...], max_memory_bytes: int, jobs: int) -> int:
    """At most `jobs` workers; fewer where the memory limit does not allow the smallest slice for each."""
    smallest = max(SMALLEST_BYTES, ROW_MULTIPLE * max((output.row_bytes for output in outputs), default=0))
    return max(1, min(jobs, max_memory_bytes // (smallest * COPIES)))


def slice_bytes_for(max_memory_bytes: int, jobs: int) -> int:
    """Source bytes of a slice."""
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
