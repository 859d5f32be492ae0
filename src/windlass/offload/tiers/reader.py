"""Reads past the page cache, many at a time, by threads.

Threads rather than io_uring: on a virtual disk both reached the same (docs/log.md), and containers often forbid io_uring. A thread waits in
the kernel without the interpreter's lock.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from windlass.core.tiers.values import BLOCK_BYTES
from windlass.errors import BadInput
from windlass.kernels.program import program
from windlass.offload.tiers.memory import page_aligned, view

DEPTH = 8
"""Reads in flight."""
PIECE_BYTES = 2**22
"""Larger reads are split, so that one of them alone keeps the disk busy. A call costs the more of a core the smaller they are."""


class ReadCounts(NamedTuple):
    num_bytes: int
    busy_seconds: float
    """With at least one read in flight."""


class DirectReader:
    def __init__(self, descriptor: int, name: str, depth: int = DEPTH, piece_bytes: int = PIECE_BYTES) -> None:
        """Takes over the descriptor."""
        self._descriptor, self._name, self._piece_bytes = descriptor, name, piece_bytes
        self._pool = ThreadPoolExecutor(depth, thread_name_prefix="tier")
        self._lock = threading.Lock()
        self._in_flight = self._num_bytes = 0
        self._busy, self._since = 0.0, 0.0

    def read(self, offset: int, buffer: memoryview) -> list[Future[None]]:
        """Begins to fill the buffer; `wait` for the result. Offset, size and address must be multiples of the block size."""
        pieces = range(0, len(buffer), self._piece_bytes)
        with self._lock:
            if not self._in_flight:
                self._since = time.perf_counter()
            self._in_flight += len(pieces)
        return [self._pool.submit(self._fill, offset + at, buffer[at : at + self._piece_bytes]) for at in pieces]

    @property
    def counts(self) -> ReadCounts:
        with self._lock:
            running = time.perf_counter() - self._since if self._in_flight else 0.0
            return ReadCounts(self._num_bytes, self._busy + running)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _fill(self, offset: int, buffer: memoryview) -> None:
        done = 0
        try:
            while done < len(buffer):
                count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
                if not count:
                    raise BadInput(
                        f"{self._name} ends at byte {offset + done}; it was changed while in use: remove it and start again"
                    )
                done += count
        except OSError as error:
            raise BadInput(f"{self._name} cannot be read at byte {offset + done}: {error.strerror}") from None
        finally:
            with self._lock:
                self._in_flight -= 1
                self._num_bytes += done
                if not self._in_flight:
                    self._busy += time.perf_counter() - self._since


def wait(reads: Sequence[Future[None]]) -> None:
    if not all(read.done() for read in reads):
        program.rest()  # threads that spin would keep the reads from being completed
    for read in reads:
        read.result()


def settle(reads: Sequence[Future[None]]) -> None:
    """Until none of them writes to its buffer any more, whether they succeeded or not."""
    for read in reads:
        with suppress(BadInput):
            read.result()


def sequential_speed(reader: DirectReader, num_bytes: int, seconds: float) -> float:
    """Bytes per second of reading the file from its start, over and over, into two buffers."""
    size = min(32 * 2**20, num_bytes // BLOCK_BYTES * BLOCK_BYTES)
    buffers = [view(page_aligned(size)), view(page_aligned(size))]
    coming = [reader.read(0, buffer) for buffer in buffers]
    wait([read for reads in coming for read in reads])  # the buffers' pages exist from here on
    before, began, position, turn = reader.counts.num_bytes, time.perf_counter(), 0, 0
    coming = [[], []]
    while time.perf_counter() - began < seconds:
        wait(coming[turn])
        coming[turn] = reader.read(position, buffers[turn])
        position = position + size if position + 2 * size <= num_bytes else 0
        turn = 1 - turn
    wait([read for reads in coming for read in reads])
    return (reader.counts.num_bytes - before) / (time.perf_counter() - began)
