"""Hardware limits (memory bandwidth, int8 throughput), measured with the kernels' thread pool (native/panel/limits.cpp)."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from windlass.runtime.kernels.cpu.linear import BLOCK, TILE_BYTES_PER_BLOCK, TILE_ROWS
from windlass.runtime.kernels.packing.panel_data import PANEL_ROWS
from windlass.runtime.kernels.packing.panels import Panels
from windlass.runtime.kernels.program import program

READ_CHUNK_BYTES = 256 * 1024
PEAK_INPUTS = 1024
"""A panel and a tile of this many inputs, 25 KB together, stay in L1."""


def read(memory: Tensor) -> None:
    """Reads every byte once."""
    seen = program.empty((64,), torch.int64)
    num_bytes = memory.numel() * memory.element_size()
    program.emit("memory_read", [seen, memory], [num_bytes, READ_CHUNK_BYTES], rows=1, counted=False)


def read_bytes_per_second(memory: Tensor) -> float:
    """`memory` should be a few times larger than all caches."""
    return memory.numel() * memory.element_size() / _seconds(lambda: read(memory))


def int8_operations_per_second(kind: str = "int4", times: int = 2000) -> float:
    """Of all threads: peak rate of packed products whose operands are in cache."""
    panel = Panels.random(kind, PANEL_ROWS, PEAK_INPUTS, BLOCK)
    tile = torch.zeros(TILE_ROWS * (PEAK_INPUTS // BLOCK) * TILE_BYTES_PER_BLOCK, dtype=torch.uint8)
    ints = [*panel.native_ints, TILE_ROWS, times]
    seconds = _seconds(lambda: program.emit("packed_peak", [panel.data, tile], ints, rows=1, counted=False))
    return 2.0 * PANEL_ROWS * PEAK_INPUTS * TILE_ROWS * times * program.num_threads() / seconds


def _seconds(work: Callable[[], None], rounds: int = 3) -> float:
    """The minimum of a few runs, since other processes only add time."""
    least = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - started)
    return least
