"""Reads past the page cache, many at a time, by threads.

Threads rather than io_uring: on a virtual disk both reached the same (docs/log.md), and containers often forbid io_uring. Native ones, where
there are kernels: threads of Python's wait for its lock between two reads.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from windlass.core.tiers.values import BLOCK_BYTES
from windlass.errors import BadInput
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.program.reads import NativeRead, NativeReads, Priority, ReadFailure, available
from windlass.runtime.offload.tiers.memory import page_aligned, view
from windlass.runtime.offload.tiers.threads import ThreadRead, ThreadReads

DEPTH = 8
"""Reads in flight."""
PIECE_BYTES = 2**22
"""Larger reads are split, so that one of them alone keeps the disk busy. A call costs the more of a core the smaller they are."""


BURST_ROUNDS, BURST_SECONDS = 3, 0.2


class ReadCounts(NamedTuple):
    num_bytes: int
    busy_seconds: float
    """With at least one read in flight."""


class Read:
    """One that was begun."""

    def __init__(self, inner: NativeRead | ThreadRead, file_name: str) -> None:
        self._inner, self._file_name = inner, file_name

    def done(self) -> bool:
        return self._inner.done()

    def cancel(self) -> None:
        """Parts that have not begun."""
        self._inner.cancel()

    def hurry(self) -> None:
        """It is needed now: it goes before those that are not."""
        self._inner.hurry()

    def settle(self) -> bool:
        """Waits until nothing writes to the buffer any more. Whether it is filled."""
        return self._inner.failure() is None and not self._inner.cancelled()

    def wait(self) -> None:
        """Until the buffer is filled. Raises if it cannot be."""
        if not self.done():
            self._inner.hurry()
            program.rest()  # threads that spin would keep the reads from being completed
        failure = self._inner.failure()
        if failure is not None:
            raise _failed(self._file_name, failure)
        if self._inner.cancelled():
            raise BadInput(f"{self._file_name} was closed while it was being read")


class DirectReader:
    def __init__(self, descriptor: int, name: str, depth: int = DEPTH, piece_bytes: int = PIECE_BYTES) -> None:
        """Takes over the descriptor."""
        self._descriptor, self._name, self._piece_bytes = descriptor, name, piece_bytes
        self._reads = NativeReads(descriptor, depth) if available() else ThreadReads(descriptor, depth)

    def read(self, offset: int, buffer: memoryview, priority: Priority = Priority.NOW) -> Read:
        """Begins to fill the buffer. Offset, size and address must be multiples of the block size."""
        return Read(self._reads.begin(offset, buffer, self._piece_bytes, priority), self._name)

    @property
    def native(self) -> NativeReads | None:
        """For native code that reads the same file; None: Python's threads read it."""
        return self._reads if isinstance(self._reads, NativeReads) else None

    @property
    def counts(self) -> ReadCounts:
        return ReadCounts(*self._reads.counts())

    def close(self) -> None:
        self._reads.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _failed(name: str, failure: ReadFailure) -> BadInput:
    if failure.error < 0:
        return BadInput(f"{name} ends at byte {failure.offset}; it was changed while in use: remove it and start again")
    return BadInput(f"{name} cannot be read at byte {failure.offset}: {os.strerror(failure.error)}")


def sequential_speed(reader: DirectReader, num_bytes: int, seconds: float) -> float:
    """Bytes per second of reading the file from its start, over and over, into two buffers."""
    size = min(32 * 2**20, num_bytes // BLOCK_BYTES * BLOCK_BYTES)
    buffers = [view(page_aligned(size)), view(page_aligned(size))]
    for buffer in buffers:
        reader.read(0, buffer).wait()  # the buffers' pages exist from here on
    before, began, position, turn = reader.counts.num_bytes, time.perf_counter(), 0, 0
    coming: list[Read | None] = [None, None]
    while time.perf_counter() - began < seconds:
        before_it = coming[turn]
        if before_it is not None:
            before_it.wait()
        coming[turn] = reader.read(position, buffers[turn])
        position = position + size if position + 2 * size <= num_bytes else 0
        turn = 1 - turn
    for read in coming:
        if read is not None:
            read.wait()
    return (reader.counts.num_bytes - before) / (time.perf_counter() - began)


def burst_speed(reader: DirectReader, places: Sequence[int], buffers: Sequence[memoryview]) -> float:
    """Bytes per second where all buffers are filled at once from random places of the file, and the next reads begin when all are full: of
    rounds the median."""
    chance = random.Random(0)
    return median(_round_of_bursts(reader, places, buffers, chance) for _ in range(BURST_ROUNDS))


def _round_of_bursts(reader: DirectReader, places: Sequence[int], buffers: Sequence[memoryview], chance: random.Random) -> float:
    began, num_bytes = time.perf_counter(), 0
    while not num_bytes or time.perf_counter() - began < BURST_SECONDS:
        for read in [reader.read(chance.choice(places), buffer) for buffer in buffers]:
            read.wait()
        num_bytes += sum(map(len, buffers))
    return num_bytes / (time.perf_counter() - began)
