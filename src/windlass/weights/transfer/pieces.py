"""What travels of a checkpoint and lies in a worker's cache: its headers (a catalogue), and pieces, each a few slices with a checksum. No torch.

A cache has a folder for each checkpoint: `catalogue`, and files of pieces. Who writes there is fleet/transfer/cache.py; part_store.py reads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from windlass.core.model import Frozen
from windlass.core.place import Interval
from windlass.core.ports import TensorStore
from windlass.errors import BadCheckpoint
from windlass.formats.safetensors.header import DTYPE_BITS
from windlass.weights.tensors.slices import Slice
from windlass.weights.tensors.stored_slices import BLOCKS

PIECE_BYTES = 2**21
"""Of a piece, at most, but for a single row that is longer. Beats of the heart wait behind one: two seconds at 10 Mbit/s."""
PIECES_VERSION = 1
"""Of what slices mean and how pieces are written: part of a checkpoint's key, so that a cache of another version is not misread."""
CHECKSUM_BYTES = 32
CATALOGUE = "catalogue"
SUFFIX = ".piece"
LENGTH_BYTES = 4
MAX_HEAD_BYTES = 2**26


class TensorHeader(Frozen, array_like=True):
    """A stored tensor, seen as rows of equal width; a vector as rows of one element."""

    name: str
    dtype: str
    """Of what its store reads."""
    shape: tuple[int, ...]
    block_type: str = ""
    """As the file stores it, in formats that have blocks."""

    @property
    def fold(self) -> int:
        """Rows of its store that are one here: blocks of four bits lie side by side in a row of their matrix."""
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
        """Where they lie in a row."""
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
    """A checkpoint without its numbers: enough to know what is read of it, and to open a folder of pieces as if it were the whole."""

    key: str
    """Of the checkpoint: other contents, another key."""
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
    """Of one slice after another, row after row, as the checkpoint stores them."""
    checksum: bytes

    @property
    def file_name(self) -> str:
        return f"{self.checksum.hex()}{SUFFIX}"


def checksum(slices: tuple[Slice, ...], data: bytes | memoryview) -> bytes:
    """Of what they are, too: bytes that are put in another place are as wrong as others."""
    found = hashlib.blake2b(msgspec.msgpack.encode(slices), digest_size=CHECKSUM_BYTES)
    found.update(data)
    return found.digest()


# --- files


class LocatedSlice(Frozen):
    """A slice, and where in which file it lies."""

    part: Slice
    file: Path
    offset: int


def piece_file(piece: CheckpointPiece) -> tuple[bytes, bytes]:
    """What a file of a piece is made of: its head, and its data. The name is the checksum."""
    head = msgspec.msgpack.encode(piece.slices)
    return len(head).to_bytes(LENGTH_BYTES, "big") + head, piece.data


_decode_slices = msgspec.msgpack.Decoder(tuple[Slice, ...]).decode


def read_piece(file: Path) -> CheckpointPiece:
    """All of it; is it what it was? `intact` says."""
    data = file.read_bytes()
    count = int.from_bytes(data[:LENGTH_BYTES], "big")
    slices = _decode_slices(data[LENGTH_BYTES : LENGTH_BYTES + count])
    return CheckpointPiece(
        slices=slices, data=data[LENGTH_BYTES + count :], checksum=bytes.fromhex(file.name.removesuffix(SUFFIX))
    )


def is_intact(piece: CheckpointPiece) -> bool:
    return checksum(piece.slices, piece.data) == piece.checksum


def slices_in_file(file: Path, tensors: dict[str, TensorHeader]) -> list[LocatedSlice] | None:
    """None where it is no whole file of a piece."""
    with file.open("rb") as stream:
        count = int.from_bytes(stream.read(LENGTH_BYTES), "big")
        if count > MAX_HEAD_BYTES:
            return None
        try:
            slices = _decode_slices(stream.read(count))
        except msgspec.DecodeError:
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
    except (OSError, msgspec.DecodeError) as error:
        raise BadCheckpoint(f"no folder of pieces of a checkpoint: {error}", folder) from None
