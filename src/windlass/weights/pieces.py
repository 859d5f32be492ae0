"""Pieces: what travels of a checkpoint and lies in a worker's cache. A few megabytes of slices, their bytes, and a checksum. No torch."""

from __future__ import annotations

import hashlib
from typing import Any

from windlass.core.model import Frozen
from windlass.errors import BadCheckpoint
from windlass.weights.slices import Slice

PIECE_BYTES = 2**20
"""Of a piece, at most, but for a single row that is longer. Beats of the heart wait behind one: a second at 10 Mbit/s."""
CHECKSUM_BYTES = 32


class Tensor(Frozen, array_like=True):
    """Of a checkpoint, as its headers have it."""

    name: str
    dtype: str
    """Of what its store reads."""
    shape: tuple[int, ...]
    block_type: str = ""
    """As the file stores it, in formats that have blocks."""


class Catalogue(Frozen):
    """A checkpoint without its numbers: enough to know what is read of it, and to open a folder of pieces as if it were the whole."""

    key: str
    """Of the checkpoint: other contents, another key."""
    name: str
    config: dict[str, Any]
    kind: str
    tensors: tuple[Tensor, ...]
    num_bytes: int = 0


class Piece(Frozen, array_like=True):
    slices: tuple[Slice, ...]
    data: bytes
    """Of one slice after another, row after row."""
    checksum: bytes

    def check(self) -> None:
        if checksum(self.slices, self.data) != self.checksum:
            raise BadCheckpoint("a piece of it came with other bytes than it was sent with", tensor=self.slices[0].name)


def checksum(slices: tuple[Slice, ...], data: bytes | memoryview) -> bytes:
    """Of what they are, too: bytes that are put in another place are as wrong as others."""
    import msgspec

    found = hashlib.blake2b(msgspec.msgpack.encode(slices), digest_size=CHECKSUM_BYTES)
    found.update(data)
    return found.digest()
