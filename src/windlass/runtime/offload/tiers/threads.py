"""Reads by threads of Python's, for machines without compiled kernels: what runtime/kernels/program/reads.py does natively."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

from windlass.runtime.kernels.program.reads import Priority, ReadFailure


class ThreadRead:
    def __init__(self, parts: list[Future[ReadFailure | None]], reads: ThreadReads) -> None:
        self._parts, self._reads = parts, reads

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def cancel(self) -> None:
        for part in self._parts:
            if part.cancel():
                self._reads.ended(0)

    def cancelled(self) -> bool:
        return any(part.cancelled() for part in self._parts)

    def hurry(self) -> None:
        """They are read in the order in which they were begun."""

    def failure(self) -> ReadFailure | None:
        found = [part.result() for part in self._parts if not part.cancelled()]
        return next((one for one in found if one is not None), None)


class ThreadReads:
    def __init__(self, descriptor: int, depth: int) -> None:
        self._descriptor = descriptor
        self._pool = ThreadPoolExecutor(depth, thread_name_prefix="tier")
        self._lock = threading.Lock()
        self._in_flight = self._num_bytes = 0
        self._busy, self._since = 0.0, 0.0

    def begin(self, offset: int, buffer: memoryview, piece_bytes: int, priority: Priority) -> ThreadRead:
        """In the order in which they are begun."""
        pieces = range(0, len(buffer), piece_bytes)
        with self._lock:
            if not self._in_flight:
                self._since = time.perf_counter()
            self._in_flight += len(pieces)
        return ThreadRead([self._pool.submit(self._fill, offset + at, buffer[at : at + piece_bytes]) for at in pieces], self)

    def counts(self) -> tuple[int, float]:
        with self._lock:
            running = time.perf_counter() - self._since if self._in_flight else 0.0
            return self._num_bytes, self._busy + running

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _fill(self, offset: int, buffer: memoryview) -> ReadFailure | None:
        done = 0
        try:
            while done < len(buffer):
                count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
                if not count:
                    return ReadFailure(-1, offset + done)
                done += count
        except OSError as error:
            return ReadFailure(error.errno or 0, offset + done)
        finally:
            self.ended(done)
        return None

    def ended(self, num_bytes: int) -> None:
        """A piece that was begun, or cancelled before."""
        with self._lock:
            self._in_flight -= 1
            self._num_bytes += num_bytes
            if not self._in_flight:
                self._busy += time.perf_counter() - self._since
