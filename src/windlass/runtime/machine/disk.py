"""How fast a folder's disk reads past the page cache, measured with a file that has no name and is gone afterwards."""

from __future__ import annotations

import errno
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SAMPLE_BYTES = 256 * 2**20
"""Enough for a disk to reach its speed; a quarter of a second on most."""
PIECE_BYTES = 2**20
DEPTH, PASSES = 8, 3
"""As runtime/offload/tiers/reader.py reads."""
PART_SUFFIX = ".tier.part"
SECONDS = 1.0
"""A slow disk is measured with what it reads in this time."""


def this_host() -> str:
    """For file names: a folder may be shared by machines."""
    return os.uname().nodename.replace(".", "_")


def unnamed_file(folder: Path) -> tuple[int, Path | None]:
    """A new file without a name; where the file system has no such files, one with a hidden name: its process and machine."""
    try:
        return os.open(folder, os.O_RDWR | os.O_TMPFILE, 0o600), None
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL) or not folder.is_dir():
            raise
    part = folder / f".{os.getpid()}.{this_host()}.{time.monotonic_ns():x}{PART_SUFFIX}"
    return os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), part


def direct(descriptor: int) -> int:
    """The same file past the page cache, the given descriptor being closed; as it is, where the file system cannot (tmpfs)."""
    try:
        opened = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return descriptor
    os.close(descriptor)
    return opened


def read_speed(folder: Path, sample_bytes: int = SAMPLE_BYTES) -> float:
    """Bytes per second. Raises OSError where nothing can be written."""
    memory = mmap.mmap(-1, sample_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    with memoryview(memory) as buffer:
        written, part = _written(folder, buffer)
        try:
            return _measured(direct(written), buffer)
        finally:
            if part is not None:
                part.unlink(missing_ok=True)


def _written(folder: Path, buffer: memoryview) -> tuple[int, Path | None]:
    descriptor, part = unnamed_file(folder)
    began = time.perf_counter()
    position = 0
    try:
        while position < len(buffer) and (position == 0 or time.perf_counter() - began < SECONDS):
            position += os.pwrite(descriptor, buffer[position : position + 16 * PIECE_BYTES], position)
        os.fsync(descriptor)
    except BaseException:
        os.close(descriptor)
        if part is not None:
            part.unlink(missing_ok=True)
        raise
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return descriptor, part


def _measured(descriptor: int, buffer: memoryview) -> float:
    """The best of some passes: what was just written is still on its way during the first."""
    size = os.fstat(descriptor).st_size // PIECE_BYTES * PIECE_BYTES
    with ThreadPoolExecutor(DEPTH) as pool:
        speeds = [_pass(pool, descriptor, buffer, size) for _ in range(PASSES)]
    os.close(descriptor)
    return max(speeds)


def _pass(pool: ThreadPoolExecutor, descriptor: int, buffer: memoryview, size: int) -> float:
    began = time.perf_counter()

    def read(position: int) -> int:
        if time.perf_counter() - began > SECONDS:
            return 0
        return os.preadv(descriptor, [buffer[position : position + PIECE_BYTES]], position)

    total = sum(pool.map(read, range(0, size, PIECE_BYTES)))
    return total / (time.perf_counter() - began)
