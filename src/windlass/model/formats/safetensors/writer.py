"""Writes one safetensors file in any order from any thread; it is renamed to its final name when complete.

All names and shapes are known up front, so the header is written first and the file has its full size from the start. Which bytes
have been written is tracked by the caller's journal.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from windlass.errors import BadInput
from windlass.model.formats.disk.atomic import part_name, sync_directory, write_errors, write_fully
from windlass.model.formats.safetensors.shards import FORMAT, OutTensor, header_bytes

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_CHUNK_BYTES = 2**20
CATCH_UP_BYTES = 16 * 2**20
"""Maximum hashed per write call, so that no worker is blocked for long."""


class SafetensorsWriter:
    def __init__(self, path: Path, tensors: Sequence[OutTensor], metadata: Mapping[str, str] = FORMAT) -> None:
        """Creates `.NAME.part`, or resumes one with the same header."""
        self.path = path
        self.part = part_name(path)
        self._header = header_bytes(tensors, metadata)
        self._starts = _starts(tensors, len(self._header))
        self._sizes = {tensor.name: tensor.num_bytes for tensor in tensors}
        self.num_bytes = len(self._header) + sum(self._sizes.values())
        with write_errors(self.part, self.num_bytes):
            self._descriptor = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self.resumed = self._has_header()
            if not self.resumed:
                self._begin_or_discard()
        self._digest = _RunningDigest(self._header)

    def write(self, name: str, byte_offset: int, buffer: ReadableBuffer) -> None:
        """Writes bytes of a tensor at `byte_offset` within it."""
        view = memoryview(buffer)
        if not 0 <= byte_offset <= self._sizes[name] - view.nbytes:
            raise IndexError(f"bytes {byte_offset}..{byte_offset + view.nbytes} of {name}, which has {self._sizes[name]}")
        if view.nbytes == 0:  # an empty view cannot be cast
            return
        view = view.cast("B")
        position = self._starts[name] + byte_offset
        with write_errors(self.part, len(view)):
            write_fully(self._descriptor, view, position)
        self._digest.update(self._descriptor, position, view)

    def sync(self) -> None:
        """Returns when everything written is on disk, so that it can be journalled."""
        with write_errors(self.part, self.num_bytes):
            os.fdatasync(self._descriptor)

    def finish(self) -> str:
        """Renames the file; returns its SHA-256 in hex. Every tensor must have been written, in this run or an earlier one."""
        with write_errors(self.part, self.num_bytes):
            digest = self._digest.finish(self._descriptor, self.num_bytes)
            os.fsync(self._descriptor)
            self.close()
            self.part.replace(self.path)
            sync_directory(self.path.parent)
        return digest

    def close(self) -> None:
        """Keeps the part, to be resumed later."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def discard(self) -> None:
        self.close()
        self.part.unlink(missing_ok=True)

    def _has_header(self) -> bool:
        """A part gets its full size only after its header is on disk; a smaller one was interrupted at creation."""
        size = os.fstat(self._descriptor).st_size
        if os.pread(self._descriptor, len(self._header), 0) == self._header:
            return size == self.num_bytes
        if size <= len(self._header):
            return False
        self.close()
        raise BadInput(f"{self.part} is an unfinished file of another conversion; delete it or use another output directory")

    def _begin_or_discard(self) -> None:
        try:
            self._begin()
        except OSError:
            self.discard()
            raise

    def _begin(self) -> None:
        os.ftruncate(self._descriptor, 0)
        write_fully(self._descriptor, memoryview(self._header), 0)
        os.fdatasync(self._descriptor)
        try:
            os.posix_fallocate(self._descriptor, 0, self.num_bytes)  # fails now if the disk is full; contiguous blocks
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(self._descriptor, self.num_bytes)


def _starts(tensors: Sequence[OutTensor], first: int) -> dict[str, int]:
    starts: dict[str, int] = {}
    for tensor in tensors:
        starts[tensor.name] = first
        first += tensor.num_bytes
    return starts


def file_digest(path: Path) -> str:
    """SHA-256 in hex."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _RunningDigest(b"").finish(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


class _RunningDigest:
    """SHA-256 of a file while it is written: bytes in order are hashed at once, those written early are read back later."""

    def __init__(self, beginning: bytes) -> None:
        self._hash = hashlib.sha256(beginning)
        self._position = len(beginning)
        self._written: dict[int, int] = {}
        """Start -> end of bytes written ahead of the hash position."""
        self._valid = True
        self._lock = Lock()

    def update(self, descriptor: int, position: int, view: memoryview) -> None:
        """Never blocks: if another thread is hashing, these bytes are left for later."""
        if position < self._position:
            self._valid = False  # hashed bytes were overwritten, perhaps with different ones
        if not self._lock.acquire(blocking=False):
            self._written[position] = position + len(view)
            return
        try:
            if position == self._position:
                self._hash.update(view)
                self._position += len(view)
            else:
                self._written[position] = position + len(view)
            self._catch_up(descriptor, CATCH_UP_BYTES)
        finally:
            self._lock.release()

    def finish(self, descriptor: int, num_bytes: int) -> str:
        if not self._valid:
            self._hash, self._position = hashlib.sha256(), 0
        self._read_back(descriptor, num_bytes)
        return self._hash.hexdigest()

    def _catch_up(self, descriptor: int, most_bytes: int) -> None:
        stop = self._position + most_bytes
        while self._position < stop and (end := self._written.pop(self._position, None)) is not None:
            self._read_back(descriptor, end)

    def _read_back(self, descriptor: int, end: int) -> None:
        buffer = memoryview(bytearray(min(_CHUNK_BYTES, max(end - self._position, 0))))
        while self._position < end:
            read = os.preadv(descriptor, [buffer[: end - self._position]], self._position)
            if read == 0:
                raise BadInput(f"a file was truncated below {end} bytes while it was being hashed")
            self._hash.update(buffer[:read])
            self._position += read
