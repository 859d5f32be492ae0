"""Layout of tensors over safetensors shards: file names, order, headers, index. Deterministic."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path

from windlass.core.model import Frozen
from windlass.errors import BadInput
from windlass.model.formats.disk.atomic import write_atomically
from windlass.model.formats.safetensors.files import SAFETENSORS_INDEX
from windlass.model.formats.safetensors.header import DTYPE_BITS, LENGTH_BYTES, METADATA
from windlass.units import GB

MAX_SHARD_BYTES = 5 * GB
"""The default of transformers."""

FORMAT = {"format": "pt"}
"""Metadata that transformers requires."""


class OutTensor(Frozen):
    name: str
    dtype: str
    """As safetensors spells it."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPE_BITS[self.dtype] // 8


class SafetensorsShard(Frozen):
    file: str
    tensors: tuple[OutTensor, ...]
    """In file order."""

    @property
    def num_bytes(self) -> int:
        """Without the header."""
        return sum(tensor.num_bytes for tensor in self.tensors)


def plan_shards(tensors: Iterable[OutTensor], max_shard_bytes: int = MAX_SHARD_BYTES) -> tuple[SafetensorsShard, ...]:
    """Fills files in the given order; a tensor larger than the limit gets a file of its own."""
    groups: list[list[OutTensor]] = [[]]
    names: set[str] = set()
    filled = 0
    for tensor in tensors:
        _check(tensor, names)
        if groups[-1] and filled + tensor.num_bytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += tensor.num_bytes
    return tuple(
        SafetensorsShard(file=_file_name(i, len(groups)), tensors=_aligned(group)) for i, group in enumerate(groups, start=1)
    )


def _check(tensor: OutTensor, names: set[str]) -> None:
    if tensor.name in names or tensor.name == METADATA:
        raise BadInput(f"tensor {tensor.name} would be written twice")
    if prod(tensor.shape) * DTYPE_BITS[tensor.dtype] % 8:
        raise BadInput(f"tensor {tensor.name}: {tensor.dtype} of shape {list(tensor.shape)} is not a whole number of bytes")
    names.add(tensor.name)


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"


def _aligned(tensors: Sequence[OutTensor]) -> tuple[OutTensor, ...]:
    """Readers that map files need aligned tensors and padding is not allowed, so tensors are reordered by element size if necessary."""
    position = 0
    for tensor in tensors:
        if position % _element_bytes(tensor):
            return tuple(sorted(tensors, key=_element_bytes, reverse=True))  # stable sort
        position += tensor.num_bytes
    return tuple(tensors)


def _element_bytes(tensor: OutTensor) -> int:
    return max(DTYPE_BITS[tensor.dtype] // 8, 1)


def header_bytes(tensors: Sequence[OutTensor], metadata: Mapping[str, str]) -> bytes:
    """Length prefix and JSON, padded with spaces to a multiple of eight."""
    entries: dict[str, object] = {METADATA: dict(sorted(metadata.items()))} if metadata else {}
    position = 0
    for tensor in tensors:
        offsets = [position, position + tensor.num_bytes]
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        position = offsets[1]
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def write_index(directory: Path, shards: Sequence[SafetensorsShard]) -> Path | None:
    """Writes model.safetensors.index.json; a single file needs none."""
    if len(shards) == 1:
        return None
    weight_map = {tensor.name: shard.file for shard in shards for tensor in shard.tensors}
    total = sum(shard.num_bytes for shard in shards)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    path = directory / SAFETENSORS_INDEX
    write_atomically(path, (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode())
    return path
