"""A checkpoint directory: tensor names, digest, and the store that reads it. Imports no torch until a store is opened."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.errors import BadInput
from windlass.model.formats.safetensors.files import (
    SAFETENSORS_INDEX,
    TORCH_INDEX,
    no_weights_error,
    read_index,
    safetensors_files,
    torch_files,
)
from windlass.model.formats.safetensors.header import read_header, read_header_bytes

if TYPE_CHECKING:
    from windlass.core.ports import TensorStore


def tensor_names(path: Path) -> frozenset[str]:
    """Names from the index and from the headers of safetensors files it does not list; empty without weights."""
    if not path.is_dir():
        return frozenset()
    index = path / SAFETENSORS_INDEX
    listed = read_index(index) if index.is_file() else {}
    others = set(safetensors_files(path)) - set(listed.values())
    return frozenset(listed) | {info.name for name in others for info in read_header(path / name)}


def open_store(path: Path) -> TensorStore:
    """A directory's safetensors files, else its PyTorch files; or a single safetensors file with config.json next to it."""
    from windlass.model.formats.safetensors.store import SafetensorsStore
    from windlass.model.formats.torch_bin import TorchStore

    if path.is_file() and path.suffix == ".safetensors":
        return SafetensorsStore(path.parent, [path.name])
    if not path.is_dir():
        raise BadInput(f"{path} is not a checkpoint directory")
    if (path / SAFETENSORS_INDEX).exists() or safetensors_files(path):
        return SafetensorsStore(path)
    if (path / TORCH_INDEX).exists() or torch_files(path):
        return TorchStore(path)
    raise no_weights_error(path)


# --- identity --------------------------------------------------------------------------------------------------------


def digest(path: Path) -> str:
    """SHA-256 over the config and the index or headers: changes with any tensor's name, shape or position."""
    found = hashlib.sha256()
    for file in [path] if path.is_file() else [path / "config.json", path / SAFETENSORS_INDEX]:
        if file.is_file():
            found.update(file.read_bytes())
    if path.is_dir() and not (path / SAFETENSORS_INDEX).is_file():
        for name in safetensors_files(path):
            found.update(read_header_bytes(path / name)[0])
    return found.hexdigest()
