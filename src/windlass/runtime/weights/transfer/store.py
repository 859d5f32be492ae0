"""A folder of received pieces as a TensorStore: what a rank of a split model opens.

Rows are returned at full width. Columns that were not received are filled with NaN (0xFF bytes), since the rank uses none of them;
rows that were not received are an error that names the tensor.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from windlass.errors import BadCheckpoint
from windlass.model.formats.disk.open_files import OpenFiles
from windlass.model.formats.dtypes import torch_dtype
from windlass.runtime.weights.source import OpenedModel, spec_of
from windlass.runtime.weights.tensors.slices import Slice, overlap, subtract
from windlass.runtime.weights.tensors.validate import locate_tensors
from windlass.runtime.weights.transfer.pieces import LocatedSlice, TensorHeader, piece_files, read_catalogue, slices_in_file

if TYPE_CHECKING:
    import numpy as np
    import torch

FILLER = 0xFF
"""Repeated, it is NaN in every float format of 8 to 64 bits."""


def open_partial(folder: Path) -> OpenedModel:
    """The counterpart of `weights.source.open_model` for a folder of pieces."""
    catalogue = read_catalogue(folder)
    store = PartialStore(folder) if catalogue.kind == "hf" else PartialBlockStore(folder)
    spec, rules = spec_of(store, catalogue.name, str(folder))
    return OpenedModel(
        store=store,
        spec=spec,
        rules=rules,
        config=store.config,
        digest=catalogue.key,
        kind=catalogue.kind,
        locations=locate_tensors(rules, store),
        name=catalogue.name,
    )


class _PartialStore:
    """The slices of each tensor that are present, and their bytes."""

    def __init__(self, folder: Path) -> None:
        catalogue = read_catalogue(folder)
        self.folder, self.config = folder, catalogue.config
        self._tensors = catalogue.by_name()
        self._held: dict[str, list[LocatedSlice]] = {}
        for file in piece_files(folder):
            for held in slices_in_file(file, self._tensors) or ():
                self._held.setdefault(held.part.name, []).append(held)
        self._files = OpenFiles()

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._header(name).shape

    def dtype(self, name: str) -> str:
        return self._header(name).dtype

    def close(self) -> None:
        self._files.close()

    def _header(self, name: str) -> TensorHeader:
        if name not in self._tensors:
            raise BadCheckpoint("no such tensor in the checkpoint", self.folder, name)
        return self._tensors[name]

    def _rows(self, header: TensorHeader, start: int, stop: int) -> np.ndarray:
        """Rows as flat bytes."""
        import numpy as np

        rows = np.empty((stop - start) * (header.row_bytes // header.fold), dtype=np.uint8)
        self._fill(header, start, stop, rows)
        return rows

    def _fill(self, header: TensorHeader, start: int, stop: int, out: np.ndarray) -> None:
        if not 0 <= start <= stop <= header.rows * header.fold or start % header.fold or stop % header.fold:
            raise IndexError(f"rows {start}..{stop} of {header.name}, which has {header.rows * header.fold}")
        if start == stop:
            return
        wanted = Slice(name=header.name, rows=(start // header.fold, stop // header.fold), columns=(0, header.width))
        target = out.reshape(wanted.num_rows, header.row_bytes)
        first, last = wanted.rows
        near = [held for held in self._held.get(header.name, ()) if held.part.rows[0] < last and held.part.rows[1] > first]
        found = [(held, part) for held in near if (part := overlap(held.part, wanted)) is not None]
        self._check(wanted, [part for _, part in found], target)
        for held, part in found:
            self._put(header, held, part, target[part.rows[0] - wanted.rows[0] : part.rows[1] - wanted.rows[0]])

    def _check(self, wanted: Slice, found: list[Slice], target: np.ndarray) -> None:
        """Every row must be present in part; missing columns are filled with NaN, so that using them shows."""
        if not subtract([wanted], found):
            return
        rows_only = [msgspec.structs.replace(part, columns=wanted.columns) for part in found]
        missing = subtract([wanted], rows_only)
        if missing:
            first, last = missing[0].rows
            raise BadCheckpoint(
                f"rows {first} to {last} were not received; delete the folder to fetch them again", self.folder, wanted.name
            )
        target.fill(FILLER)

    def _put(self, header: TensorHeader, held: LocatedSlice, part: Slice, target: np.ndarray) -> None:
        """Copies whole rows of a piece to their columns."""
        import numpy as np

        left, right = header.column_bytes(held.part.columns)
        position = held.offset + (part.rows[0] - held.part.rows[0]) * (right - left)
        if right - left == header.row_bytes:
            self._read(held, position, target.data.cast("B"))
            return
        rows = np.empty((part.num_rows, right - left), dtype=np.uint8)
        self._read(held, position, rows.data.cast("B"))
        target[:, left:right] = rows

    def _read(self, held: LocatedSlice, position: int, buffer: memoryview) -> None:
        with self._files.reading(held.file) as descriptor:
            while len(buffer):
                count = os.preadv(descriptor, [buffer], position)
                if not count:
                    raise BadCheckpoint("the file ends within the tensor: it is truncated", held.file, held.part.name, position)
                position, buffer = position + count, buffer[count:]


class PartialStore(_PartialStore):
    """For safetensors and PyTorch checkpoints, which store plain rows."""

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        import torch

        header = self._header(name)
        raw = torch.as_tensor(self._rows(header, start, stop)).view(torch_dtype(header.dtype))
        return raw.view(stop - start) if len(header.shape) < 2 else raw.view(stop - start, header.shape[-1])

    def read_into(self, name: str, byte_offset: int, buffer: memoryview) -> None:
        """Bytes as they are stored; whole rows only."""
        import numpy as np

        header = self._header(name)
        row_bytes = header.row_bytes // header.fold
        start, stop = byte_offset // row_bytes, (byte_offset + buffer.nbytes) // row_bytes
        if byte_offset % row_bytes or buffer.nbytes % row_bytes:
            raise IndexError(f"bytes {byte_offset}..{byte_offset + buffer.nbytes} of {name} are not whole rows")
        self._fill(header, start, stop, np.frombuffer(buffer, dtype=np.uint8))


class PartialBlockStore(_PartialStore):
    """For formats with blocks (GGUF, Distributed Llama): rows dequantized, or still quantized."""

    def block_type(self, name: str) -> str:
        return self._header(name).block_type

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        import torch

        from windlass.model.formats.gguf.blocks import dequantize
        from windlass.runtime.weights.tensors.stored_slices import BLOCKS

        header = self._header(name)
        if len(header.shape) < 2:  # vectors are sent dequantized
            return torch.as_tensor(self._rows(header, start, stop)).view(torch_dtype(header.dtype))
        stored = torch.as_tensor(self._rows(header, start, stop)).view(-1, BLOCKS[header.block_type].num_bytes)
        return dequantize(header.block_type, stored).view(stop - start, -1).to(torch_dtype(header.dtype))

    def raw_blocks(self, name: str, start: int, stop: int) -> tuple[str, bytearray]:
        header = self._header(name)
        if len(header.shape) < 2:
            raise IndexError(f"{name} has one dimension; its blocks are not rows")
        return header.block_type, bytearray(self._rows(header, start, stop).data)
