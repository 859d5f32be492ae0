"""Fills device memory from files with native threads (native/loader/loader.cpp): read into pinned buffers, copied, repacked into tiles.

Python says once what is to be read and where it goes; reading, copies and repacking of different chunks overlap, and none of it takes Python's lock.
Knows no checkpoint.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from windlass.errors import BadCheckpoint
from windlass.runtime.kernels import build
from windlass.runtime.kernels.cuda import driver

MAX_WORKERS = 12
SLOT_BYTES = 2**23
"""Of a buffer. Each worker has two, so that all of them are 192 MiB of pinned memory, and as much on the device while weights are read."""
SLOTS_PER_WORKER = 2
NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: not ordered with PyTorch's default stream."""


class Functions(ctypes.Structure):
    """Addresses; mirrors `Functions` in native/loader/loader.cpp, as the following mirror what is called like them."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("set_context", "exchange_capture_mode", "copy", "launch", "synchronize")]


class _Slot(ctypes.Structure):
    _fields_ = [("buffer", ctypes.c_void_p), ("staging", ctypes.c_uint64), ("stream", ctypes.c_void_p)]


class _Read(ctypes.Structure):
    _fields_ = [
        ("file", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        *((name, ctypes.c_int64) for name in ("offset", "size", "to")),
    ]


class _Chunk(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_reads", "size")),
        ("repack", ctypes.c_void_p),
        ("target", ctypes.c_uint64),
        ("scales", ctypes.c_int64),
        *((name, ctypes.c_uint32) for name in ("rows", "inputs", "tile_blocks", "paired")),
        ("blocks", ctypes.c_uint64),
    ]


class _State(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("is_over", "num_bytes")),
        *((name, ctypes.c_double) for name in ("first", "last")),
        *((name, ctypes.c_int64) for name in ("error", "error_file", "error_at")),
    ]


class Read(NamedTuple):
    """Bytes of a file, and where in the buffer they go."""

    file: int
    offset: int
    size: int
    to: int


class Repack(NamedTuple):
    """Codes, then scales in a buffer, as matrices [rows, inputs] to be made tiles of: see layout.repack."""

    scales: int
    """Where in the buffer they begin."""
    rows: int
    inputs: int
    group: int
    tile_blocks: int
    paired: bool
    blocks: int
    """Of all matrices of the buffer."""


class Chunk(NamedTuple):
    """What goes through a buffer at a time."""

    reads: Sequence[Read]
    size: int
    target: int
    """An address on the device."""
    repack: Repack | None = None
    """None: the bytes as they are."""


class Slot(NamedTuple):
    buffer: int
    staging: int
    stream: int


class DeviceSide(Protocol):
    """Buffers and functions of a device: CUDA's, or a stand-in's."""

    functions: Functions
    context: int
    slots: Sequence[Slot]
    slot_bytes: int

    def repack(self, group: int) -> int:
        """The kernel."""
        ...

    def settle(self) -> None:
        """Returns when all streams are done."""
        ...

    def free(self) -> None: ...


class CudaSide:
    """Its streams are its own: one of PyTorch's might be the one on which a graph is captured meanwhile."""

    def __init__(self, device: torch.device, workers: int | None = None, slot_bytes: int = SLOT_BYTES) -> None:
        self._device, self.slot_bytes = device, slot_bytes
        count = SLOTS_PER_WORKER * (workers or default_workers())
        names = (
            "cuCtxSetCurrent",
            "cuThreadExchangeStreamCaptureMode",
            "cuMemcpyHtoDAsync_v2",
            "cuLaunchKernel",
            "cuStreamSynchronize",
        )
        self.functions = Functions(*map(driver.address, names))
        self._staging = torch.empty(count * slot_bytes, dtype=torch.uint8, device=device)
        torch.cuda.current_stream(device).synchronize()  # what used this memory before is done; and there is a context
        self._memory, context = ctypes.c_void_p(), ctypes.c_void_p()
        self._streams: list[int] = []
        self._repacks: dict[int, int] = {}
        with torch.cuda.device(device):
            driver.call("cuCtxGetCurrent", "looking up the device's context", ctypes.byref(context))
            size = ctypes.c_size_t(count * slot_bytes)
            driver.call("cuMemHostAlloc", "allocating pinned memory", ctypes.byref(self._memory), size, ctypes.c_uint(0))
            for _ in range(count):
                self._streams.append(_stream())
        self.context = context.value or 0
        start = self._memory.value or 0
        self.slots: Sequence[Slot] = [
            Slot(start + number * slot_bytes, self._staging.data_ptr() + number * slot_bytes, stream)
            for number, stream in enumerate(self._streams)
        ]

    def repack(self, group: int) -> int:
        if group not in self._repacks:  # asked for with every chunk
            with torch.cuda.device(self._device):
                self._repacks[group] = driver.kernel("small.cu", "PPPIIIIQ", "repack", packed=False, GROUP=group).function
        return self._repacks[group]

    def settle(self) -> None:
        for stream in self._streams:
            driver.call("cuStreamSynchronize", "copying weights to the device", ctypes.c_void_p(stream))

    def free(self) -> None:
        """Also the pinned memory, which PyTorch would keep."""
        streams, self._streams, memory, self._memory = self._streams, [], self._memory, ctypes.c_void_p()
        with torch.cuda.device(self._device):
            for stream in streams:
                driver.call("cuStreamDestroy_v2", "ending a stream", ctypes.c_void_p(stream))
            if memory:
                driver.call("cuMemFreeHost", "freeing pinned memory", memory)
        self._staging = torch.empty(0)


def _stream() -> int:
    made = ctypes.c_void_p()
    driver.call("cuStreamCreate", "making a stream", ctypes.byref(made), ctypes.c_uint(NON_BLOCKING))
    return made.value or 0


def default_workers() -> int:
    """Two cores are left to Python and the device's driver."""
    return max(1, min(MAX_WORKERS, len(os.sched_getaffinity(0)) - 2))


class LoaderState(NamedTuple):
    is_over: bool
    num_bytes: int
    """Read until now."""
    first: float
    """time.monotonic() of the first and the last byte; 0: none yet."""
    last: float


class Loader:
    def __init__(self, side: DeviceSide) -> None:
        self._side, self._native = side, _prepared()
        self._files: dict[Path, int] = {}
        self._descriptors: list[int] = []
        self._ended = LoaderState(True, 0, 0.0, 0.0)
        slots = (_Slot * len(side.slots))(*side.slots)
        workers = len(side.slots) // SLOTS_PER_WORKER
        self._handle: int | None = self._native.windlass_loader_open(ctypes.byref(side.functions), side.context, slots, workers)

    @property
    def slot_bytes(self) -> int:
        return self._side.slot_bytes

    def file(self, path: Path) -> int:
        """The number of a file, which is opened the first time."""
        if path not in self._files:
            try:
                # The path has been resolved; O_NOFOLLOW refuses a link that replaced it since.
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError as error:
                raise BadCheckpoint(f"cannot be opened: {error.strerror}", path) from None
            self._descriptors.append(descriptor)
            self._files[path] = len(self._files)
            self._native.windlass_loader_file(self._handle, descriptor)
        return self._files[path]

    def submit(self, chunks: Sequence[Chunk]) -> None:
        """Begins as soon as there is a free buffer; chunks are begun in order, and end in any. Targets must live until it is over."""
        reads = [(read.file, 0, read.offset, read.size, read.to) for chunk in chunks for read in chunk.reads]
        self._native.windlass_loader_submit(
            self._handle, (_Chunk * len(chunks))(*map(self._fields, chunks)), len(chunks), (_Read * len(reads))(*reads)
        )

    def _fields(self, chunk: Chunk) -> tuple[int, ...]:
        assert 0 < chunk.size <= self.slot_bytes
        how = chunk.repack
        if how is None:
            return (len(chunk.reads), chunk.size, 0, chunk.target)
        kernel = self._side.repack(how.group)
        shape = (how.rows, how.inputs, how.tile_blocks, int(how.paired))
        return (len(chunk.reads), chunk.size, kernel, chunk.target, how.scales, *shape, how.blocks)

    def state(self, wait_seconds: float = 0.0) -> LoaderState:
        """Waits so long for the end of what was submitted. Raises what went wrong."""
        if self._handle is None:
            return self._ended
        found = _State()
        self._native.windlass_loader_wait(self._handle, wait_seconds, ctypes.byref(found))
        if found.error:
            self._fail(found)
        return LoaderState(bool(found.is_over), found.num_bytes, found.first, found.last)

    def _fail(self, found: _State) -> None:
        if found.error_file < 0:
            raise driver.CudaFailed(f"copying weights to the device failed (CUDA error {found.error})")
        path = next(path for path, number in self._files.items() if number == found.error_file)
        what = (
            "the file ends within a tensor: it is truncated" if found.error < 0 else f"cannot be read: {os.strerror(found.error)}"
        )
        raise BadCheckpoint(what, path, offset=found.error_at)

    def finish(self, wait_seconds: float = 0.1) -> None:
        """Returns when everything is on the device. In short waits: signals are heard between them."""
        while not self.state(wait_seconds).is_over:
            pass
        self._side.settle()

    def close(self) -> None:
        """What has not begun is left out. May be called twice."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        found = _State()
        self._native.windlass_loader_wait(handle, 0.0, ctypes.byref(found))
        self._ended = LoaderState(True, found.num_bytes, found.first, found.last)
        self._native.windlass_loader_close(handle)
        for descriptor in self._descriptors:
            os.close(descriptor)
        try:
            self._side.settle()  # nothing writes to memory that is freed
        finally:
            self._side.free()


def available() -> bool:
    return build.library("loader") is not None


@cache
def _prepared() -> ctypes.CDLL:
    library = build.library("loader")
    assert library is not None, "check `available()` first"
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.windlass_loader_open.restype = pointer
    library.windlass_loader_open.argtypes = [pointer, pointer, pointer, ctypes.c_int]
    library.windlass_loader_close.argtypes = [pointer]
    library.windlass_loader_file.argtypes = [pointer, ctypes.c_int]
    library.windlass_loader_submit.argtypes = [pointer, pointer, size, pointer]
    library.windlass_loader_wait.argtypes = [pointer, ctypes.c_double, pointer]
    return library
