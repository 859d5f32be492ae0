"""A directory of safetensors files as a TensorStore (core.ports)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.errors import BadCheckpoint, BadInput
from windlass.model.formats.config import read_config
from windlass.model.formats.disk.reader import TensorReader
from windlass.model.formats.disk.tensor_info import TensorInfo
from windlass.model.formats.safetensors.files import (
    SAFETENSORS_INDEX,
    file_within,
    missing_files,
    no_weights_error,
    read_index,
    safetensors_files,
)
from windlass.model.formats.safetensors.header import read_header

if TYPE_CHECKING:
    import torch


class SafetensorsStore:
    """`files`: only these files, ignoring the index (for a checkpoint that is still downloading)."""

    def __init__(self, directory: Path, files: Sequence[str] | None = None) -> None:
        self.config: dict[str, Any] = read_config(directory)
        self.directory = directory
        index = _read_index(directory) if files is None else {}
        names = _file_names(directory, index) if files is None else list(files)
        files_named = {name: directory / name for name in names}
        real_files = {file: file_within(directory, name) for name, file in files_named.items()}
        self._reader = TensorReader(real_files)
        self._tensors = _tensors(directory, real_files)
        _check_index(directory, index, files_named, self._tensors)

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.info(name).shape

    def dtype(self, name: str) -> str:
        return self.info(name).dtype

    def info(self, name: str) -> TensorInfo:
        found = self._tensors.get(name)
        if found is None:
            raise BadCheckpoint("no such tensor in the checkpoint", self.directory, name)
        return found

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._reader.read(self.info(name), start, stop)

    def read_into(self, name: str, byte_offset: int, buffer: memoryview) -> None:
        """Stored bytes into a caller's buffer."""
        self._reader.read_into(self.info(name), byte_offset, buffer)

    def read_pieces(self, pieces: Sequence[tuple[str, int, memoryview]]) -> None:
        """The same for many tensors; neighbours in a file are read in one go."""
        self._reader.read_pieces([(self.info(name), byte_offset, buffer) for name, byte_offset, buffer in pieces])

    def place_of(self, name: str) -> tuple[Path, int]:
        """The resolved file, and the offset of the tensor's first byte."""
        info = self.info(name)
        return self._reader.real_files[info.file], info.start

    def close(self) -> None:
        self._reader.close()


# --- contents of the directory ----------------------------------------------------------------------------------------


def _read_index(directory: Path) -> dict[str, str]:
    if not (directory / SAFETENSORS_INDEX).exists():
        return {}
    file_within(directory, SAFETENSORS_INDEX)
    return read_index(directory / SAFETENSORS_INDEX)


def _file_names(directory: Path, index: dict[str, str]) -> list[str]:
    """Those the index lists, then any others in the directory: GLM-4.6's MTP layer is in a file the index does not list."""
    named = set(index.values())
    missing = missing_files(directory, named)
    if missing:
        first = next(name for name, file in index.items() if file == missing[0])
        file = missing[0] if missing[0].isprintable() else ascii(missing[0])  # the message is one line
        what = f"the index lists {file}, which is missing ({len(missing)} of {len(named)} files); download the model again"
        raise BadCheckpoint(what, directory / SAFETENSORS_INDEX, first)
    names = sorted(named) + [name for name in safetensors_files(directory) if name not in named]
    if not names:
        raise no_weights_error(directory)
    return names


def _tensors(directory: Path, files: Iterable[Path]) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    for file in files:
        for info in read_header(file):
            if info.name in found:
                what = f"is in {found[info.name].file} as well; remove one of the two files"
                raise BadCheckpoint(what, file, info.name, info.start)
            found[info.name] = info
    if not found:
        raise BadInput(f"{directory}: its safetensors files contain no tensors")
    return found


def _check_index(directory: Path, index: dict[str, str], files: dict[str, Path], tensors: dict[str, TensorInfo]) -> None:
    """`files`: those that `tensors` name, so that equal ones are nearly always identical; comparing paths is slow."""
    for name, file in index.items():
        found = tensors.get(name)
        if found is None:
            raise BadCheckpoint(f"the index says it is in {file}, which does not have it", directory / SAFETENSORS_INDEX, name)
        if found.file is not files[file] and found.file != files[file]:
            what = f"the index says it is in {file}; it is in {found.file.name}"
            raise BadCheckpoint(what, directory / SAFETENSORS_INDEX, name)
