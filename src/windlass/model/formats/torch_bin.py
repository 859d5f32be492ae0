"""PyTorch `.bin` checkpoints as a TensorStore. They are pickles, so they are loaded with `weights_only=True`, which runs no code."""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from windlass.core.model import Frozen
from windlass.errors import BadCheckpoint
from windlass.model.formats.config import read_config
from windlass.model.formats.disk.reader import TensorReader, check_rows, row_shape
from windlass.model.formats.disk.tensor_info import TensorInfo
from windlass.model.formats.dtypes import dtype_name
from windlass.model.formats.safetensors.files import (
    TORCH_INDEX,
    file_within,
    missing_files,
    no_weights_error,
    read_index,
    torch_files,
)

if TYPE_CHECKING:
    import torch


class MappedRegion(Frozen):
    """An address range that maps a file."""

    first: int
    stop: int
    file_offset: int


class TorchStore:
    """torch.load maps each file once to find where its tensors are; rows are then read with pread."""

    def __init__(self, directory: Path) -> None:
        self.config: dict[str, Any] = read_config(directory)
        self.directory = directory
        index = _read_index(directory)
        real_files = {directory / name: file_within(directory, name) for name in _file_names(directory, index)}
        self._reader = TensorReader(real_files)
        self._tensors: dict[str, TensorInfo | torch.Tensor] = {}
        for file, real in real_files.items():
            self._add(file, real)
        for name, file_name in index.items():
            if name not in self._tensors:
                what = f"the index says it is in {file_name}, which does not have it"
                raise BadCheckpoint(what, directory / TORCH_INDEX, name)

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor(name).shape)

    def dtype(self, name: str) -> str:
        dtype = self._tensor(name).dtype
        return dtype if isinstance(dtype, str) else dtype_name(dtype)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        tensor = self._tensor(name)
        if isinstance(tensor, TensorInfo):
            return self._reader.read(tensor, start, stop)
        shape = row_shape(tuple(tensor.shape))
        check_rows(name, start, stop, shape[0])
        return tensor.detach().reshape(shape)[start:stop].contiguous().clone()

    def close(self) -> None:
        self._tensors.clear()
        self._reader.close()

    def _tensor(self, name: str) -> TensorInfo | torch.Tensor:
        if name not in self._tensors:
            raise BadCheckpoint("no such tensor in the checkpoint", self.directory, name)
        return self._tensors[name]

    def _add(self, file: Path, real: Path) -> None:
        tensors = load(real, file)
        mappings = mappings_of(real)
        for name, tensor in tensors.items():
            if name in self._tensors:
                raise BadCheckpoint("is in another file of the directory as well; remove one of them", file, name)
            self._tensors[name] = locate(name, tensor, file, mappings) or tensor


def load(file: Path, label: Path) -> dict[str, torch.Tensor]:
    """Memory-mapped tensors of one file. `label`: path for messages (a hub cache stores files under their hash)."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old pickle protocols and storages
            values: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise _refusal(label, str(error)) from None
    except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadCheckpoint(f"cannot be loaded; it is damaged or older than PyTorch 1.6: {first}", label) from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in cast(dict[Any, Any], values)):
        raise BadCheckpoint("not a state dict: a dictionary of tensors is expected", label)
    tensors = cast(dict[str, Any], values)
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_quantized:
            raise BadCheckpoint(f"is a {type(value).__name__}; only dense tensors are read", label, name)
    return tensors


def _refusal(file: Path, message: str) -> BadCheckpoint:
    """Replaces torch's message, which is a page long and suggests loading the file unsafely."""
    code = re.search(r"GLOBAL ([\w.]+)", message)
    if code is None:
        return BadCheckpoint("not a pickle of tensors, or damaged; no code was executed", file)
    return BadCheckpoint(f"refused: the pickle would execute code ({code[1]}); use a safetensors version of the model", file)


def _read_index(directory: Path) -> dict[str, str]:
    if not (directory / TORCH_INDEX).exists():
        return {}
    file_within(directory, TORCH_INDEX)
    return read_index(directory / TORCH_INDEX)


def _file_names(directory: Path, index: dict[str, str]) -> list[str]:
    missing = missing_files(directory, set(index.values()))
    if missing:
        raise BadCheckpoint(f"the index names {missing[0]}, which is missing; download it again", directory / TORCH_INDEX)
    names = sorted(set(index.values())) or torch_files(directory)
    if not names:
        raise no_weights_error(directory)
    return names


# --- from mapped memory back to the file -----------------------------------------------------------------------------


def locate(name: str, tensor: torch.Tensor, file: Path, mappings: list[MappedRegion]) -> TensorInfo | None:
    """Position of a mapped tensor in the file; None if it is not contiguous there (e.g. transposed)."""
    first, num_bytes = tensor.data_ptr(), tensor.numel() * tensor.itemsize
    for mapping in mappings if tensor.is_contiguous() and num_bytes else []:
        if mapping.first <= first and first + num_bytes <= mapping.stop:
            shape, start = tuple(tensor.shape), first - mapping.first + mapping.file_offset
            return TensorInfo(name=name, dtype=dtype_name(tensor.dtype), shape=shape, file=file, start=start, num_bytes=num_bytes)
    return None


def mappings_of(file: Path) -> list[MappedRegion]:
    """Address ranges where this process maps the file (man 5 proc_pid_maps). Empty without /proc: tensors then stay mapped."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    found: list[MappedRegion] = []
    for line in maps.read_text(errors="surrogateescape").splitlines():
        addresses, _, offset, _, _, *path = line.split(maxsplit=5)
        if path == [str(file)]:
            first, stop = (int(address, 16) for address in addresses.split("-"))
            found.append(MappedRegion(first=first, stop=stop, file_offset=int(offset, 16)))
    return found
