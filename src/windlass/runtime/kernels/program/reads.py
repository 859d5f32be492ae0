"""Reads of a file into memory by native threads (native/program/reads.cpp). Knows no format."""

from __future__ import annotations

import ctypes
import threading
from enum import IntEnum
from functools import cache
from typing import NamedTuple

from windlass.runtime.kernels import build


class _State(ctypes.Structure):
    """Mirrors `State` in native/program/reads.cpp."""

    _fields_ = [(name, ctypes.c_int64) for name in ("left", "cancelled", "error", "error_at")]


class Priority(IntEnum):
    """The first that there are any of are served (`queues` in native/program/reads.cpp)."""

    NOW = 0
    """A step waits for it."""
    SOON = 1
    IDLE = 2
    """Has time until the disk has nothing else to do."""


class ReadFailure(NamedTuple):
    error: int
    """errno; -1: the file ends there."""
    offset: int


class NativeRead:
    """One that was begun, and keeps its buffer."""

    def __init__(self, reads: NativeReads, buffer: memoryview) -> None:
        self._reads, self.state, self.buffer = reads, _State(), buffer

    def done(self) -> bool:
        return self._reads.is_over(self)

    def cancel(self) -> None:
        """Parts that have not begun."""
        self._reads.cancel(self)

    def cancelled(self) -> bool:
        """Of one that is over: whether parts were left out."""
        return self.state.cancelled > 0

    def hurry(self) -> None:
        """It is waited for from now on: it goes before reads that are not."""
        self._reads.hurry(self)

    def failure(self) -> ReadFailure | None:
        """Waits until it is over."""
        self._reads.wait(self)
        return ReadFailure(self.state.error, self.state.error_at) if self.state.error else None


class NativeReads:
    """Of one file."""

    def __init__(self, descriptor: int, depth: int) -> None:
        """`depth`: reads at a time."""
        self._native = _prepared(_library())
        self._handle: int | None = self._native.windlass_reads_open(descriptor, depth)
        self._open = threading.Lock()
        self._begun: dict[int, NativeRead] = {}
        """Kept until they are known to be over: threads write to their state and buffer."""

    @property
    def handle(self) -> int:
        """For native code, which calls the same functions."""
        assert self._handle is not None
        return self._handle

    def begin(self, offset: int, buffer: memoryview, piece_bytes: int, priority: Priority) -> NativeRead:
        """Fills the buffer, in several pieces at a time."""
        read = NativeRead(self, buffer)
        self._begun[id(read)] = read
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        self._native.windlass_reads_begin(
            self._handle, ctypes.byref(read.state), offset, address, len(buffer), piece_bytes, int(priority)
        )
        return read

    def is_over(self, read: NativeRead) -> bool:
        if self._handle is not None and not self._native.windlass_reads_over(self._handle, ctypes.byref(read.state)):
            return False
        self._begun.pop(id(read), None)
        return True

    def wait(self, read: NativeRead) -> None:
        if self._handle is not None:
            self._native.windlass_reads_await(self._handle, ctypes.byref(read.state))
        self._begun.pop(id(read), None)

    def cancel(self, read: NativeRead) -> None:
        if self._handle is not None:
            self._native.windlass_reads_cancel(self._handle, ctypes.byref(read.state))

    def hurry(self, read: NativeRead) -> None:
        if self._handle is not None:
            self._native.windlass_reads_hurry(self._handle, ctypes.byref(read.state))

    def counts(self) -> tuple[int, float]:
        """Bytes read, and seconds with at least one read in flight. Of any thread."""
        num_bytes, seconds = ctypes.c_int64(), ctypes.c_double()
        with self._open:
            if self._handle is not None:
                self._native.windlass_reads_counts(self._handle, ctypes.byref(num_bytes), ctypes.byref(seconds))
        return num_bytes.value, seconds.value

    def close(self) -> None:
        """What has not begun is left out; what has is waited for."""
        with self._open:  # no other thread is counting
            handle, self._handle = self._handle, None
        if handle is not None:
            self._native.windlass_reads_close(handle)
            self._begun.clear()


def available() -> bool:
    return build.library("native") is not None


def _library() -> ctypes.CDLL:
    library = build.library("native")
    assert library is not None, "check `available()` first"
    return library


@cache
def _prepared(library: ctypes.CDLL) -> ctypes.CDLL:
    handle, state, size = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64
    library.windlass_reads_open.restype = handle
    library.windlass_reads_open.argtypes = [ctypes.c_int, ctypes.c_int]
    library.windlass_reads_close.argtypes = [handle]
    library.windlass_reads_begin.argtypes = [handle, state, size, ctypes.c_void_p, size, size, ctypes.c_int]
    for name in ("over", "await", "cancel", "hurry"):
        getattr(library, f"windlass_reads_{name}").argtypes = [handle, state]
    library.windlass_reads_counts.argtypes = [handle, ctypes.c_void_p, ctypes.c_void_p]
    return library
