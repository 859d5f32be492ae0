"""Memory that direct reads can fill: it starts on a page."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from windlass.core.tiers.values import BLOCK_BYTES

HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)


def page_aligned(num_bytes: int) -> Tensor:
    """uint8 [num_bytes], in huge pages where the system has them. Pages that nothing was written to take no memory."""
    mapped = mmap.mmap(-1, max(num_bytes, BLOCK_BYTES), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if HUGE_PAGES is not None and num_bytes >= 2**21:
        mapped.madvise(HUGE_PAGES)
    return torch.frombuffer(mapped, dtype=torch.uint8)[:num_bytes]


def view(memory: Tensor) -> memoryview:
    """The same bytes as a buffer that system calls can fill."""
    return memory.numpy().data
