"""Memory for the intermediate results of a recorded program: the peak of what is live at once, not the sum.

A range becomes free when the last tensor that uses it is collected, as with PyTorch's allocator; but it stays in the arena, so that a
replay finds every result where the recording put it.
"""

from __future__ import annotations

import weakref
from math import prod

import numpy
import torch
from torch import Tensor

ALIGNMENT = 64
CHUNK_BYTES = 16 * 2**20


class Arena:
    def __init__(self) -> None:
        self._chunks: list[numpy.ndarray] = []
        self._free: list[tuple[int, int, int]] = []
        """(chunk, start, stop), sorted, neighbours merged."""

    @property
    def num_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self._chunks)

    def owns(self, tensor: Tensor) -> bool:
        address = tensor.data_ptr()
        return any(chunk.ctypes.data <= address < chunk.ctypes.data + chunk.nbytes for chunk in self._chunks)

    def alias(self, tensor: Tensor) -> Tensor:
        """A contiguous view of the tensor's memory that does not keep its range from being reused once the tensor is collected."""
        address, num_bytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        chunk = next(chunk for chunk in self._chunks if chunk.ctypes.data <= address < chunk.ctypes.data + chunk.nbytes)
        start = address - chunk.ctypes.data
        return torch.from_numpy(chunk[start : start + num_bytes]).view(tensor.dtype).view(tensor.shape)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = max(prod(shape) * dtype.itemsize, 1)
        chunk, start = self._take(-(-num_bytes // ALIGNMENT) * ALIGNMENT)
        # The tensor's storage owns this view; when the storage is collected, so is the view, and its range becomes free.
        owned = self._chunks[chunk][start : start + num_bytes].view(_Range)
        stop = start + -(-num_bytes // ALIGNMENT) * ALIGNMENT
        weakref.finalize(owned, self._free_range, chunk, start, stop).atexit = False
        return torch.from_numpy(owned)[: prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def _take(self, num_bytes: int) -> tuple[int, int]:
        """The smallest free range that is large enough, or a new chunk."""
        fitting = [(stop - start, index) for index, (_, start, stop) in enumerate(self._free) if stop - start >= num_bytes]
        if not fitting:
            self._grow(num_bytes)
            return self._take(num_bytes)
        _, index = min(fitting)
        chunk, start, stop = self._free.pop(index)
        if start + num_bytes < stop:
            self._free.append((chunk, start + num_bytes, stop))
        return chunk, start

    def _grow(self, num_bytes: int) -> None:
        size = max(num_bytes, CHUNK_BYTES)
        raw = numpy.empty(size + ALIGNMENT, dtype=numpy.uint8)
        first = -raw.ctypes.data % ALIGNMENT
        self._chunks.append(raw[first : first + size])
        self._free.append((len(self._chunks) - 1, 0, size))

    def _free_range(self, chunk: int, start: int, stop: int) -> None:
        merged: list[tuple[int, int, int]] = []
        for piece in sorted([*self._free, (chunk, start, stop)]):
            if merged and merged[-1][0] == piece[0] and merged[-1][2] == piece[1]:
                merged[-1] = (piece[0], merged[-1][1], piece[2])
            else:
                merged.append(piece)
        self._free = merged


class _Range(numpy.ndarray):
    """An array that supports weak references."""
