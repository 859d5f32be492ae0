"""Reads a GGUF file: metadata, and rows as stored or as float32. Knows no model.

Rows are read with pread, never mapped.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from windlass.errors import BadCheckpoint, BadInput
from windlass.model.formats.gguf.blocks import check_type, dequantize
from windlass.model.formats.gguf.header import GgufTensor, read_header

_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
MAX_SHARDS = 4096


class GgufFile:
    """One file. `tensors` is by name; shapes are slowest dimension first."""

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self.path = path
        self.metadata: dict[str, Any] = header.metadata
        self.tensors: dict[str, GgufTensor] = header.tensors
        self._descriptor = os.open(path, os.O_RDONLY)

    def read_blocks(self, name: str, start_row: int, stop_row: int) -> bytearray:
        """Rows start_row..stop_row (leading dimensions flattened), still quantized."""
        tensor = self.tensors[name]
        if not 0 <= start_row <= stop_row <= tensor.num_rows:
            raise IndexError(f"rows {start_row} to {stop_row} of {name}, which has {tensor.num_rows}")
        return self._read(tensor.start + start_row * tensor.row_bytes, (stop_row - start_row) * tensor.row_bytes, name)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Rows start..stop as float32 [stop - start, last dimension]; of a one-dimensional tensor, elements start..stop."""
        tensor = self.tensors[name]
        check_type(name, tensor.type.name)
        if len(tensor.shape) == 1:
            return self._decode(tensor, self.read_blocks(name, 0, 1))[0, start:stop]
        return self._decode(tensor, self.read_blocks(name, start, stop))

    def decode(self, name: str, blocks: bytearray) -> Tensor:
        """Dequantizes whole rows returned by `read_blocks` to float32."""
        return self._decode(self.tensors[name], blocks)

    def _decode(self, tensor: GgufTensor, blocks: bytearray) -> Tensor:
        if not blocks:
            return torch.empty(0, tensor.shape[-1])
        stored = torch.frombuffer(blocks, dtype=torch.uint8).view(-1, tensor.type.num_bytes)
        return dequantize(tensor.type.name, stored).view(-1, tensor.shape[-1])

    def _read(self, position: int, count: int, name: str) -> bytearray:
        buffer = bytearray(count)
        view, done = memoryview(buffer), 0
        while done < count:  # one call gives at most 2 GiB on Linux
            got = os.preadv(self._descriptor, [view[done:]], position + done)
            if got == 0:
                raise BadCheckpoint(
                    f"{self.path} ends at byte {position + done} inside tensor {name}; it was truncated while being read"
                )
            done += got
        return buffer

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def shard_paths(path: Path) -> tuple[Path, ...]:
    """The files of a model split as `NAME-00001-of-00003.gguf`, given any of them; otherwise the file itself."""
    match = _SHARD.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    if not 1 <= count <= MAX_SHARDS:
        raise BadInput(f"{path} claims to be one of {count} shards; at most {MAX_SHARDS} are supported")
    found = tuple(path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1))
    for file in found:
        if not file.is_file():
            raise BadInput(f"{path} is one of {count} shards and {file.name} is missing; download all of them")
    return found
