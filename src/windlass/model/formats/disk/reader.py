"""Reads tensors with pread, since mapped pages would count as resident memory. Thread-safe."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.errors import BadCheckpoint
from windlass.model.formats.disk.open_files import OpenFiles
from windlass.model.formats.disk.tensor_info import TensorInfo
from windlass.model.formats.dtypes import torch_dtype

if TYPE_CHECKING:
    import torch


Piece = tuple[TensorInfo, int, memoryview]
"""A tensor, an offset in its bytes, and the buffer for what follows."""
MAX_GAP_BYTES = 4096
"""Between pieces that are read in one go: what packed matrices have there is their shape, 16 bytes. Less than a read costs."""
MAX_BUFFERS = 1024
"""Of one preadv (IOV_MAX of Linux and macOS)."""


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
        self.real_files = real_files
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
        _check_bytes(info, byte_offset, buffer)
        if buffer.nbytes:
            self._read_run([(info, byte_offset, buffer)])

    def read_pieces(self, pieces: Sequence[Piece]) -> None:
        """Fills the buffer of each; those that lie one after another in a file are read in one go, wherever their buffers are."""
        for piece in pieces:
            _check_bytes(*piece)
        for run in _runs(pieces):
            self._read_run(run)

    def _read_run(self, run: list[Piece]) -> None:
        with self._open_files.reading(self.real_files[run[0][0].file]) as descriptor:
            _read_fully(descriptor, _position(run[0]), [(info, buffer.cast("B")) for info, _, buffer in run])

    def close(self) -> None:
        self._open_files.close()


def _check_bytes(info: TensorInfo, byte_offset: int, buffer: memoryview) -> None:
    if not 0 <= byte_offset <= info.num_bytes - buffer.nbytes:
        raise IndexError(f"bytes {byte_offset}..{byte_offset + buffer.nbytes} of {info.name}, which has {info.num_bytes}")


def _runs(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Pieces in file order, cut where the next does not begin at the end of the one before, or soon after it."""
    files: dict[Path, list[Piece]] = {}
    for piece in pieces:
        if piece[2].nbytes:
            files.setdefault(piece[0].file, []).append(piece)
    found: list[list[Piece]] = []
    for of_file in files.values():
        end = -MAX_GAP_BYTES - 1
        for piece in sorted(of_file, key=_position):
            gap = _position(piece) - end
            if not 0 <= gap <= MAX_GAP_BYTES or len(found[-1]) + bool(gap) >= MAX_BUFFERS:
                found.append([])
            elif gap:
                info = found[-1][-1][0]
                found[-1].append((info, end - info.start, memoryview(bytearray(gap))))
            found[-1].append(piece)
            end = _position(piece) + piece[2].nbytes
    return found


def _position(piece: Piece) -> int:
    return piece[0].start + piece[1]


def _read_fully(descriptor: int, position: int, pieces: list[tuple[TensorInfo, memoryview]]) -> None:
    """A read may return fewer bytes than requested (at most 2 GiB on Linux), but zero only at the end."""
    while pieces:
        info = pieces[0][0]
        try:
            num_bytes = os.preadv(descriptor, [buffer for _, buffer in pieces], position)
        except OSError as error:
            raise BadCheckpoint(f"cannot be read: {error.strerror}", info.file, info.name, position) from None
        if num_bytes == 0:
            raise BadCheckpoint("the file ends within the tensor: it is truncated", info.file, info.name, position)
        position += num_bytes
        pieces = _after(pieces, num_bytes)


def _after(pieces: list[tuple[TensorInfo, memoryview]], num_bytes: int) -> list[tuple[TensorInfo, memoryview]]:
    """What is left to read after so many bytes."""
    for number, (info, buffer) in enumerate(pieces):
        if num_bytes < len(buffer):
            return [(info, buffer[num_bytes:]), *pieces[number + 1 :]]
        num_bytes -= len(buffer)
    return []
