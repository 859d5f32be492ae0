"""CRC-32 of every 64 KiB of a file, so that damage is found when the block is first read, without reading the rest.

CRC-32 finds every burst of up to 32 bits, and other damage with probability 1 - 2^-32; against intent the manifest has SHA-256. A block is
about what the kernel reads ahead for one row anyway.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 1 << 16


class BlockChecksums:
    """Of a stream that comes in pieces."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._crc = self._num_bytes = 0

    def update(self, content: memoryview) -> None:
        rest = content.cast("B") if content.nbytes else memoryview(b"")
        while rest:
            piece = rest[: BLOCK_BYTES - self._num_bytes]
            self._crc = crc32(piece, self._crc)
            self._num_bytes += len(piece)
            rest = rest[len(piece) :]
            if self._num_bytes == BLOCK_BYTES:
                self._end_block()

    def finish(self) -> NDArray[np.uint32]:
        if self._num_bytes:
            self._end_block()
        return np.array(self._done, "<u4")

    def _end_block(self) -> None:
        self._done.append(self._crc)
        self._crc = self._num_bytes = 0


class CheckedBlocks:
    """The blocks of a mapped file, each checked once."""

    def __init__(self, content: memoryview, checksums: NDArray[np.uint32]) -> None:
        self._content, self._checksums = content, checksums
        self._is_checked = bytearray(len(checksums))

    def damaged(self, first: int, last: int) -> int | None:
        """The first damaged block of those with bytes `first` to `last`, both included; None: all are good."""
        begin, end = first // BLOCK_BYTES, last // BLOCK_BYTES + 1
        while (block := self._is_checked.find(0, begin, end)) >= 0:
            place = block * BLOCK_BYTES
            if crc32(self._content[place : place + BLOCK_BYTES]) != self._checksums[block]:
                return block
            self._is_checked[block] = 1
        return None
