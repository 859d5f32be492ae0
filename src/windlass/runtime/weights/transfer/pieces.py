"""The unit of transfer between machines: a catalogue of tensor headers, and pieces (a few slices with a checksum). No torch.

A worker's cache has a folder per checkpoint: `catalogue`, and one file per piece. runtime/fleet/transfer/cache.py writes
it, transfer/store.py reads it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.core.model import Frozen
from windlass.core.place import Interval
from windlass.core.ports import TensorStore
from windlass.errors import BadCheckpoint
from windlass.model.formats.safetensors.header import DTYPE_BITS
from windlass.runtime.weights.tensors.slices import Slice
from windlass.runtime.weights.tensors.stored_slices import BLOCKS

PIECE_BYTES = 2**21
"""Maximum size of a piece, except for a single longer row. Heartbeats queue behind a piece: two seconds at 10 Mbit/s."""
PIECES_VERSION = 1
"""Version of the piece format; part of the cache key, so that older caches are not misread."""
CHECKSUM_BYTES = 32
CATALOGUE = "catalogue"
SUFFIX = ".piece"
LENGTH_BYTES = 4
MAX_HEAD_BYTES = 2**26


class TensorHeader(Frozen, array_like=True):
    """A stored tensor as rows of equal width; a vector as rows of one element."""

    name: str
    dtype: str
    """Dtype that the store's `read` returns."""
    shape: tuple[int, ...]
    block_type: str = ""
    """ggml block type; empty for formats without blocks."""

    @property
    def fold(self) -> int:
        """Store rows per row here: MXFP4 blocks [.., n, 16] are joined to one row of their matrix."""
        return self.shape[-2] if self.name.endswith("_blocks") and len(self.shape) > 2 else 1

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1]) // self.fold if len(self.shape) > 1 else prod(self.shape)

    @property
    def width(self) -> int:
        return self.shape[-1] * self.fold if len(self.shape) > 1 else 1

    @property
    def row_bytes(self) -> int:
        return self.column_bytes((0, self.width))[1]

    def column_bytes(self, columns: Interval) -> Interval:
        """Byte interval of these columns within a row."""
        if self.block_type and len(self.shape) > 1:
            block = BLOCKS[self.block_type]
            return columns[0] // block.elements * block.num_bytes, columns[1] // block.elements * block.num_bytes
        bits = DTYPE_BITS[self.dtype]
        return columns[0] * bits // 8, columns[1] * bits // 8

    def num_bytes(self, of: Slice) -> int:
        left, right = self.column_bytes(of.columns)
        return of.num_rows * (right - left)

    def holds(self, one: Slice) -> bool:
        within = 0 <= one.rows[0] < one.rows[1] <= self.rows and 0 <= one.columns[0] < one.columns[1] <= self.width
        whole = not self.block_type or len(self.shape) < 2 or not any(at % BLOCKS[self.block_type].elements for at in one.columns)
        return within and whole


class Catalogue(Frozen):
    """Headers of a checkpoint: enough to compute which slices a rank reads, and to open a folder of pieces as a store."""

    key: str
    """Cache key of the checkpoint."""
    name: str
    config: dict[str, Any]
    kind: str
    tensors: tuple[TensorHeader, ...]

    def by_name(self) -> dict[str, TensorHeader]:
        return {tensor.name: tensor for tensor in self.tensors}


def catalogue_of(store: TensorStore, key: str, name: str, kind: str) -> Catalogue:
    block_type = getattr(store, "block_type", None)
    tensors = tuple(
        TensorHeader(name=one, dtype=store.dtype(one), shape=store.shape(one), block_type=block_type(one) if block_type else "")
        for one in store.names()
    )
    return Catalogue(key=key, name=name, config=dict(store.config), kind=kind, tensors=tensors)


class CheckpointPiece(Frozen, array_like=True):
    slices: tuple[Slice, ...]
    data: bytes
    """The slices one after another, row by row, as stored."""
    checksum: bytes

    @property
    def file_name(self) -> str:
        return f"{self.checksum.hex()}{SUFFIX}"


def checksum(slices: tuple[Slice, ...], data: bytes | memoryview) -> bytes:
    """Covers the slices' positions as well as the data."""
    found = hashlib.blake2b(msgspec.msgpack.encode(slices), digest_size=CHECKSUM_BYTES)
    found.update(data)
    return found.digest()


# --- files


class LocatedSlice(Frozen):
    """A slice and its position in a piece file."""

    part: Slice
    file: Path
    offset: int


def piece_file(piece: CheckpointPiece) -> tuple[bytes, bytes]:
    """Header and data of the piece's file; its name is the checksum."""
    head = msgspec.msgpack.encode(piece.slices)
    return len(head).to_bytes(LENGTH_BYTES, "big") + head, piece.data


_decode_slices = msgspec.msgpack.Decoder(tuple[Slice, ...]).decode


def read_piece(file: Path) -> CheckpointPiece:
    """Reads a piece without checking it; see `is_intact`."""
    data = file.read_bytes()
    count = int.from_bytes(data[:LENGTH_BYTES], "big")
    slices = _decode_slices(data[LENGTH_BYTES : LENGTH_BYTES + count])
    return CheckpointPiece(
        slices=slices, data=data[LENGTH_BYTES + count :], checksum=bytes.fromhex(file.name.removesuffix(SUFFIX))
    )


def is_intact(piece: CheckpointPiece) -> bool:
    return checksum(piece.slices, piece.data) == piece.checksum


def slices_in_file(file: Path, tensors: dict[str, TensorHeader]) -> list[LocatedSlice] | None:
    """None where the file is not a complete piece."""
    with file.open("rb") as stream:
        count = int.from_bytes(stream.read(LENGTH_BYTES), "big")
        if count > MAX_HEAD_BYTES:
            return None
        try:
            slices = _decode_slices(stream.read(count))
        except DECODE_ERRORS:
            return None
        size = stream.seek(0, 2)
    return _located(file, slices, LENGTH_BYTES + count, size, tensors)


def _located(
    file: Path, slices: Iterable[Slice], offset: int, size: int, tensors: dict[str, TensorHeader]
) -> list[LocatedSlice] | None:
    found: list[LocatedSlice] = []
    for one in slices:
        header = tensors.get(one.name)
        if header is None or not header.holds(one):
            return None
        found.append(LocatedSlice(part=one, file=file, offset=offset))
        offset += header.num_bytes(one)
    return found if offset == size else None


def piece_files(folder: Path) -> Iterator[Path]:
    return (file for file in folder.iterdir() if file.suffix == SUFFIX)


def read_catalogue(folder: Path) -> Catalogue:
    file = folder / CATALOGUE
    try:
        return msgspec.msgpack.decode(file.read_bytes(), type=Catalogue)
    except (OSError, *DECODE_ERRORS) as error:
        raise BadCheckpoint(f"not a cache folder of checkpoint pieces: {error}", folder) from None
