"""A directory of safetensors files as one store of tensors. Reads with plain reads: a mapped page would count as ours.

Implements core.ports.TensorStore; knows nothing of what the tensors mean.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.errors import BadCheckpoint, BadInput
from windlass.formats.checkpoint import read_config
from windlass.formats.files import SAFETENSORS_INDEX, file_within, missing_files, nothing_found, read_index, safetensors_files
from windlass.formats.open_files import OpenFiles
from windlass.formats.safetensors import TensorInfo, read_header
from windlass.formats.torch_dtypes import torch_dtype

if TYPE_CHECKING:
    import torch


def row_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """As a store reads it: rows of the last dimension, all leading ones flattened; a scalar is one element."""
    if len(shape) < 2:
        return shape or (1,)
    return prod(shape[:-1]), shape[-1]


class SafetensorsStore:
    """`files` limits it to some of the directory's files, of which the index is then not asked: a checkpoint that is still arriving."""

    def __init__(self, directory: Path, files: Sequence[str] | None = None) -> None:
        self.config: dict[str, Any] = read_config(directory)
        self.directory = directory
        index = _read_index(directory) if files is None else {}
        self._tensors = _tensors(directory, _file_names(directory, index) if files is None else list(files))
        _check_index(directory, index, self._tensors)
        self.unlisted: tuple[str, ...] = tuple(name for name in self._tensors if name not in index) if index else ()
        """Tensors the index does not speak of; they are read like any other (GLM-4.6's MTP layer came so)."""
        self._open_files = OpenFiles()

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.info(name).shape

    def dtype(self, name: str) -> str:
        return self.info(name).dtype

    def info(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise BadCheckpoint("the checkpoint has no such tensor", self.directory, name)
        return self._tensors[name]

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows start..stop in memory of their own."""
        import torch

        info = self.info(name)
        dtype, (num_rows, *columns) = torch_dtype(info.dtype), row_shape(info.shape)
        if not 0 <= start <= stop <= num_rows:
            raise IndexError(f"rows {start}..{stop} of {name}, which has {num_rows}")
        row_bytes = prod(columns) * dtype.itemsize
        raw = torch.empty((stop - start) * row_bytes, dtype=torch.uint8)
        self.read_into(name, start * row_bytes, memoryview(raw.numpy()))
        return raw.view(dtype).view(stop - start, *columns)

    def read_into(self, name: str, byte_offset: int, buffer: memoryview) -> None:
        """Fills the buffer with the tensor's bytes from `byte_offset` on, for callers that use their memory again."""
        info = self.info(name)
        if not 0 <= byte_offset <= info.num_bytes - len(buffer):
            raise IndexError(f"bytes {byte_offset}..{byte_offset + len(buffer)} of {name}, which has {info.num_bytes}")
        with self._open_files.reading(info.file) as descriptor:
            _read_fully(descriptor, info, info.start + byte_offset, buffer)

    def close(self) -> None:
        self._open_files.close()


def _read_fully(descriptor: int, info: TensorInfo, position: int, buffer: memoryview) -> None:
    """One read may give less than it was asked for (Linux gives 2 GiB at most), but never nothing before the end."""
    while len(buffer):
        try:
            num_bytes = os.preadv(descriptor, [buffer], position)
        except OSError as error:
            raise BadCheckpoint(f"cannot be read: {error.strerror}", info.file, info.name, position) from None
        if num_bytes == 0:
            raise BadCheckpoint("the file ends within the tensor: it was cut short", info.file, info.name, position)
        position += num_bytes
        buffer = buffer[num_bytes:]


# --- what the directory holds ----------------------------------------------------------------------------------------


def _read_index(directory: Path) -> dict[str, str]:
    index = directory / SAFETENSORS_INDEX
    return read_index(index) if index.exists() else {}


def _file_names(directory: Path, index: dict[str, str]) -> list[str]:
    """Those of the index, then others that lie beside them."""
    named = set(index.values())
    missing = missing_files(directory, named)
    if missing:
        first = next(name for name, file in index.items() if file == missing[0])
        what = f"the index names {missing[0]}, which is missing ({len(missing)} of {len(named)} files are); download it again"
        raise BadCheckpoint(what, directory / SAFETENSORS_INDEX, first)
    names = sorted(named) + [name for name in safetensors_files(directory) if name not in named]
    if not names:
        raise nothing_found(directory)
    return names


def _tensors(directory: Path, files: Sequence[str]) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    for name in files:
        for info in read_header(file_within(directory, name)):
            if info.name in found:
                what = f"is in {found[info.name].file} too; which of them counts is not known, so remove one of the files"
                raise BadCheckpoint(what, directory / name, info.name, info.start)
            found[info.name] = info
    if not found:
        raise BadInput(f"{directory}: its safetensors files hold no tensor")
    return found


def _check_index(directory: Path, index: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    for name, file in index.items():
        if name not in tensors:
            raise BadCheckpoint(f"the index says it is in {file}, which does not have it", directory / SAFETENSORS_INDEX, name)
        if tensors[name].file != file_within(directory, file):
            what = f"the index says it is in {file}; it is in {tensors[name].file}"
            raise BadCheckpoint(what, directory / SAFETENSORS_INDEX, name)
