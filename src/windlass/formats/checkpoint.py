"""A checkpoint directory: its config, and the names of its tensors, read without loading a weight."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from windlass.errors import BadInput

MAX_HEADER_BYTES = 512 * 2**20
"""A safetensors header beyond this is damage: half a gigabyte of names would be millions of tensors."""


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a directory, or the file itself."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise BadInput(f"{path} has no config.json; give a model directory, a config.json, or a name from `windlass models`")
    try:
        values = msgspec.json.decode(file.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"{file} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise BadInput(f"{file}: expected a JSON object")
    return values  # pyright: ignore[reportUnknownVariableType]


def tensor_names(path: Path) -> frozenset[str]:
    """Names in the index, or in the headers of the safetensors files; empty where there are none."""
    if not path.is_dir():
        return frozenset()
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return frozenset(_index_names(index))
    return frozenset(name for file in sorted(path.glob("*.safetensors")) for name in _header_names(file))


def _index_names(index: Path) -> Iterator[str]:
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=dict[str, Any])["weight_map"]
        yield from msgspec.convert(weight_map, dict[str, str])
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, KeyError) as error:
        raise BadInput(f"{index} is not a safetensors index: {error}") from None


def _header(file: Path) -> bytes:
    """A safetensors file begins with the length of its JSON header, eight bytes, little endian."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, file.stat().st_size - 8):
            raise BadInput(
                f"{file} is not a safetensors file: its header claims {length} bytes of a {file.stat().st_size}-byte file"
            )
        return stream.read(length)


def _header_names(file: Path) -> Iterator[str]:
    try:
        header = json.loads(_header(file))
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{file} has a damaged header: {error}") from None
    if not isinstance(header, dict):
        raise BadInput(f"{file} has a damaged header: expected a JSON object")
    yield from (str(name) for name in header if name != "__metadata__")  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


def digest(path: Path) -> str:
    """SHA-256 over the config and the index, or the headers where there is no index: changes when a tensor's name or place does."""
    import hashlib

    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    found = hashlib.sha256()
    config, index = path / "config.json", path / "model.safetensors.index.json"
    for file in (config, index):
        if file.is_file():
            found.update(file.read_bytes())
    if not index.is_file():
        for file in sorted(path.glob("*.safetensors")):
            found.update(_header(file))
    return found.hexdigest()
