"""A Distributed Llama `.m` file as a TensorStore: Hugging Face names, Q and K rows permuted back, blocks dequantized to float32.

Combines the container (`formats.dllama`) with the tensor order (`families.dllama.names`). Reads with pread, thread-safe.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from windlass.core.model import Frozen, ModelSpec
from windlass.errors import BadCheckpoint, BadInput, Impossible
from windlass.model.families import describe
from windlass.model.families.dllama.header import config_from
from windlass.model.families.dllama.names import FileTensor, tensor_order
from windlass.model.formats.dllama.blocks import decode
from windlass.model.formats.dllama.file import DllamaHeader, WeightType, read_header, read_weight_type, to_halves

_BLOCK_NAMES = {WeightType.Q40: "Q4_0", WeightType.Q80: "Q8_0"}
"""ggml's names of the same blocks."""


class PlacedTensor(Frozen):
    """A tensor and its position in the file."""

    tensor: FileTensor
    kind: WeightType
    offset: int

    @property
    def num_rows(self) -> int:
        """A vector counts as one row."""
        return self.tensor.shape[0] if len(self.tensor.shape) > 1 else 1

    @property
    def width(self) -> int:
        return self.tensor.shape[-1]

    @property
    def row_bytes(self) -> int:
        return self.kind.row_bytes(self.width)

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes


def place_tensors(spec: ModelSpec, kind: WeightType, offset: int) -> Iterator[PlacedTensor]:
    """Every tensor of the file with its byte offset, the first at `offset`."""
    for tensor in tensor_order(spec):
        found = PlacedTensor(tensor=tensor, kind=kind if tensor.packed else WeightType.F32, offset=offset)
        if found.width % found.kind.block:
            raise Impossible(
                f"{tensor.name} has rows of {found.width}, not a multiple of the block size {found.kind.block}; choose f32 or f16"
            )
        yield found
        offset += found.num_bytes


class DllamaStore:
    """TensorStore over one `.m` file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        self.kind = read_weight_type(path, header)
        """Of the matrices; embeddings, routers, norms and biases are always F32."""
        where = f"{path} header"
        self.config: dict[str, Any] = config_from(header.values, where)
        self.spec = describe(self.config, where=where)
        try:
            self._placed = _placed_within(path, header, self.spec, self.kind)
        except Impossible as error:
            raise BadCheckpoint(f"invalid header: {error}", path) from None
        self._file = os.open(path, os.O_RDONLY)

    def names(self) -> Collection[str]:
        return self._placed.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).tensor.shape

    def dtype(self, name: str) -> str:
        """Of what `read` returns: blocks are dequantized to float32. `block_type` says how they are stored."""
        return "F16" if self._find(name).kind is WeightType.F16 else "F32"

    def block_type(self, name: str) -> str:
        """`Q4_0`, `Q8_0`, `F16` or `F32`: how the file stores it."""
        kind = self._find(name).kind
        return _BLOCK_NAMES.get(kind, kind.name)

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        found = self._find(name)
        if len(found.tensor.shape) == 1:
            return decode(self._bytes(found, 0, 1), found.kind, found.width)[0, start:stop].clone()
        return decode(self._bytes(found, start, stop), found.kind, found.width)

    def raw_blocks(self, name: str, start: int, stop: int) -> tuple[str, bytearray]:
        """Rows start..stop in Hugging Face order, still quantized."""
        found = self._find(name)
        if len(found.tensor.shape) == 1:
            raise IndexError(f"{name} has one dimension; its blocks are not rows")
        return self.block_type(name), bytearray(self._bytes(found, start, stop))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> DllamaStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _find(self, name: str) -> PlacedTensor:
        if name not in self._placed:
            raise BadInput(f"{self.path} has no tensor {name}")
        return self._placed[name]

    def _bytes(self, found: PlacedTensor, start: int, stop: int) -> np.ndarray:
        """Rows in Hugging Face order [stop - start, row_bytes]; of permuted tensors whole heads are read, then sliced."""
        assert 0 <= start <= stop <= found.num_rows, f"rows {start}..{stop} of {found.num_rows}"
        head = found.tensor.head_dim
        if not head:
            return self._pread(found, start, stop)
        first = start // head * head
        whole = to_halves(self._pread(found, first, -(-stop // head) * head), head)
        return np.ascontiguousarray(whole[start - first : stop - first])

    def _pread(self, found: PlacedTensor, start: int, stop: int) -> np.ndarray:
        rows = np.empty((stop - start, found.row_bytes), dtype=np.uint8)
        view, offset = rows.data.cast("B") if rows.size else memoryview(b""), found.offset + start * found.row_bytes
        while view:
            count = os.preadv(self._file, [view], offset)
            if not count:
                raise BadCheckpoint(
                    "the file ends within the tensor; it was truncated after it was opened", self.path, found.tensor.name, offset
                )
            view, offset = view[count:], offset + count
        return rows


def _placed_within(path: Path, header: DllamaHeader, spec: ModelSpec, kind: WeightType) -> dict[str, PlacedTensor]:
    """Stops at the end of the file, so that a damaged header costs nothing. Tensors must fill the file exactly."""
    placed: dict[str, PlacedTensor] = {}
    end = header.num_bytes
    for found in place_tensors(spec, kind, header.num_bytes):
        end = found.offset + found.num_bytes
        if end > header.file_bytes:
            raise BadCheckpoint(
                f"needs {found.num_bytes} bytes but the file ends at byte {header.file_bytes}; it is truncated, or its header is invalid",
                path,
                found.tensor.name,
                found.offset,
            )
        placed[found.tensor.name] = found
    if end != header.file_bytes:
        raise BadCheckpoint(f"{header.file_bytes - end} bytes follow the last tensor; the header is invalid", path, offset=end)
    return placed
