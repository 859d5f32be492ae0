"""Reads tensors with pread, since mapped pages would count as resident memory. Thread-safe."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.errors import BadCheckpoint
from windlass.formats.disk.open_files import OpenFiles
from windlass.formats.disk.tensor_info import TensorInfo
from windlass.formats.dtypes import torch_dtype

if TYPE_CHECKING:
    import torch


def row_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape as rows: leading dimensions flattened; a scalar is one element."""
    if len(shape) < 2:
        return shape or (1,)
    return prod(shape[:-1]), shape[-1]


def check_rows(name: str, start: int, stop: int, num_rows: int) -> None:
    if not 0 <= start <= stop <= num_rows:
        raise IndexError(f"rows {start}..{stop} of {name}, which has {num_rows}")


class TensorReader:
    """`real_files`: file as named in messages -> resolved path to open."""

    def __init__(self, real_files: Mapping[Path, Path]) -> None:
        self._real_files = real_files
        self._open_files = OpenFiles()

    def read(self, info: TensorInfo, start: int, stop: int) -> torch.Tensor:
        """Rows start..stop in new memory."""
        import torch

        dtype, (num_rows, *columns) = torch_dtype(info.dtype), row_shape(info.shape)
        check_rows(info.name, start, stop, num_rows)
        row_bytes = prod(columns) * dtype.itemsize
        raw = torch.empty((stop - start) * row_bytes, dtype=torch.uint8)
        self.read_into(info, start * row_bytes, raw.numpy().data)
        return raw.view(dtype).view(stop - start, *columns)

    def read_into(self, info: TensorInfo, byte_offset: int, buffer: memoryview) -> None:
        """Fills the buffer with the tensor's bytes from `byte_offset` on."""
        if not 0 <= byte_offset <= info.num_bytes - buffer.nbytes:
            raise IndexError(f"bytes {byte_offset}..{byte_offset + buffer.nbytes} of {info.name}, which has {info.num_bytes}")
        if buffer.nbytes:
            with self._open_files.reading(self._real_files[info.file]) as descriptor:
                _read_fully(descriptor, info, info.start + byte_offset, buffer.cast("B"))

    def close(self) -> None:
        self._open_files.close()


def _read_fully(descriptor: int, info: TensorInfo, position: int, buffer: memoryview) -> None:
    """A read may return fewer bytes than requested (at most 2 GiB on Linux), but zero only at the end."""
    while len(buffer):
        try:
            num_bytes = os.preadv(descriptor, [buffer], position)
        except OSError as error:
            raise BadCheckpoint(f"cannot be read: {error.strerror}", info.file, info.name, position) from None
        if num_bytes == 0:
            raise BadCheckpoint("the file ends within the tensor: it is truncated", info.file, info.name, position)
        position += num_bytes
        buffer = buffer[num_bytes:]
