"""A cache in pinned host memory of experts whose home is a file, for the CPU's part of routed layers (runtime/kernels/native/tiles/disk.cpp).

The thread that answers the device decides what is read into which slot. Others may hold what is there for a while.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from windlass.errors import BadInput, DoesNotFit
from windlass.runtime.kernels import build
from windlass.runtime.kernels.program.reads import NativeReads
from windlass.runtime.offload.device.share import library
from windlass.runtime.offload.experts.cache import HALF_LIFE

PIECE_BYTES = 2**20
"""Of a read: a token often misses one expert of a layer, which alone has to keep the disk busy."""


class CacheForm(NamedTuple):
    """What lies in a block of the file, and in a slot."""

    num_experts: int
    """Of each layer."""
    block_bytes: int
    down_at: int
    """Of the down matrix; gate and up begin the block."""


class CacheCounts(NamedTuple):
    hits: int
    """Uses of experts that were found in memory."""
    misses: int
    num_errors: int
    """Reads that failed."""


class _Shape(ctypes.Structure):
    """Mirrors `DiskShape` in native/tiles/disk.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("layers", "experts", "slots", "block_bytes", "down_at", "piece_bytes")),
        ("half_life", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("offsets", "memory", "reads", "begin", "over", "await_")),
    ]


class _Counts(ctypes.Structure):
    """Mirrors `DiskCounts` in native/tiles/disk.h."""

    _fields_ = [(name, ctypes.c_int64) for name in ("hits", "misses", "errors", "error", "error_at")]


class DiskCache:
    def __init__(self, form: CacheForm, offsets: Sequence[int], memory: Tensor, reads: NativeReads, name: str) -> None:
        """`offsets`: in the file, of each layer's first expert. `memory`: uint8 [slots, block bytes]. `name`: of the file."""
        lib, native = library(), build.library("native")
        assert lib is not None and native is not None
        self.form, self.memory, self._name = form, memory, name
        self._lib, self._reads = _prepared(lib), reads
        self._offsets = (ctypes.c_int64 * len(offsets))(*offsets)
        functions = [_address(native, f"windlass_reads_{which}") for which in ("begin", "over", "await")]
        self._shape = _Shape(
            len(offsets), form.num_experts, memory.shape[0], form.block_bytes, form.down_at, PIECE_BYTES, HALF_LIFE,
            ctypes.addressof(self._offsets), memory.data_ptr(), reads.handle, *functions,
        )  # fmt: skip
        self.handle = ctypes.c_void_p(self._lib.disk_open(ctypes.byref(self._shape)))
        if not self.handle:
            raise DoesNotFit("there is no memory for the cache of experts on disk; lower --host-memory", 0)
        self.close = weakref.finalize(self, self._lib.disk_close, self.handle)
        self._seen_errors = 0

    def hold(self, layer: int) -> list[int]:
        """For each expert of a layer its slot, or -1: it is not in memory. They stay there until they are let go."""
        slots = (ctypes.c_int32 * self.form.num_experts)()
        self._lib.disk_hold(self.handle, layer, slots)
        return list(slots)

    def let_go(self, slots: Sequence[int]) -> None:
        self._lib.disk_let_go(self.handle, (ctypes.c_int32 * len(slots))(*slots), len(slots))

    @property
    def counts(self) -> CacheCounts:
        found = self._counts()
        return CacheCounts(found.hits, found.misses, found.errors)

    def check(self) -> None:
        """Raises if a read has failed since the last look: the answer of a step was not whole."""
        found = self._counts()
        if found.errors == self._seen_errors:
            return
        self._seen_errors = found.errors
        if found.error < 0:
            raise BadInput(f"{self._name} ends at byte {found.error_at}; it was changed while in use: remove it and start again")
        why = os.strerror(found.error) if found.error else "it was closed"
        raise BadInput(f"{self._name} cannot be read at byte {found.error_at}: {why}")

    def _counts(self) -> _Counts:
        found = _Counts()
        self._lib.disk_counts(self.handle, ctypes.byref(found))
        return found


def _prepared(lib: ctypes.CDLL) -> ctypes.CDLL:
    handle = ctypes.c_void_p
    lib.disk_open.restype, lib.disk_open.argtypes = handle, [handle]
    lib.disk_close.argtypes = [handle]
    lib.disk_hold.argtypes = [handle, ctypes.c_int, handle]
    lib.disk_let_go.argtypes = [handle, handle, ctypes.c_int]
    lib.disk_counts.argtypes = [handle, handle]
    return lib


def _address(lib: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(lib, name), ctypes.c_void_p).value or 0
