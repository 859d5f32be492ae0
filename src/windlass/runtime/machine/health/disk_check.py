"""A folder's disk measured for a check: room, sequential and random reads and writes past the page cache, rename and fsync."""

from __future__ import annotations

import mmap
import os
import random
import shutil
import time
from pathlib import Path

from windlass.core.model import Frozen
from windlass.runtime.machine.disk import direct, read_speed, this_host, unnamed_file

BLOCK = 4096
SAMPLE_BYTES = 64 * 2**20
SECONDS = 1.0
"""For each measurement."""


class DiskFacts(Frozen):
    """Zero: not measured."""

    folder: str
    free_bytes: int
    total_bytes: int
    free_inodes: int | None = None
    is_writable: bool = True
    problem: str = ""
    clock_ahead_seconds: float = 0.0
    """Of whoever dates files there: with shared storage the file server."""
    read_bytes_per_second: float = 0.0
    write_bytes_per_second: float = 0.0
    random_reads_per_second: float = 0.0
    fsync_seconds: float = 0.0
    renames: bool | None = None
    """A file that was written, synced and renamed is there under its new name alone."""


def disk_room(folder: Path) -> DiskFacts:
    """Without writing more than an empty file."""
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    usage, inodes = shutil.disk_usage(existing), os.statvfs(existing)
    problem, ahead = "", 0.0
    try:
        descriptor, part = unnamed_file(existing if existing.is_dir() else existing.parent)
        ahead = os.fstat(descriptor).st_mtime - time.time()
        os.close(descriptor)
        if part is not None:
            part.unlink(missing_ok=True)
    except OSError as error:
        problem = error.strerror or str(error)
    return DiskFacts(
        folder=str(folder),
        free_bytes=usage.free,
        total_bytes=usage.total,
        free_inodes=inodes.f_favail if inodes.f_files else None,
        is_writable=not problem,
        problem=problem,
        clock_ahead_seconds=ahead,
    )


def measure_disk(folder: Path, sample_bytes: int = SAMPLE_BYTES) -> DiskFacts:
    """About four seconds. Leaves nothing behind."""
    room = disk_room(folder)
    if room.problem or not folder.is_dir() or room.free_bytes < 2 * sample_bytes:
        return room
    try:
        write, fsync = _write_speed(folder, sample_bytes)
        return DiskFacts(
            folder=room.folder,
            free_bytes=room.free_bytes,
            total_bytes=room.total_bytes,
            free_inodes=room.free_inodes,
            read_bytes_per_second=read_speed(folder, sample_bytes),
            write_bytes_per_second=write,
            random_reads_per_second=_random_reads(folder, sample_bytes),
            fsync_seconds=fsync,
            renames=renames(folder),
        )
    except OSError as error:
        return DiskFacts(
            folder=room.folder,
            free_bytes=room.free_bytes,
            total_bytes=room.total_bytes,
            is_writable=False,
            problem=error.strerror or str(error),
        )


def _write_speed(folder: Path, sample_bytes: int) -> tuple[float, float]:
    """Bytes per second of direct writes (buffered where the file system has no others), and the seconds of one small fsync."""
    descriptor, part = unnamed_file(folder)
    buffer = mmap.mmap(-1, 4 * 2**20)
    buffer.write(os.urandom(len(buffer)))  # a file system that compresses would be too fast
    try:
        _set_direct(descriptor)
        began, position = time.perf_counter(), 0
        while position < sample_bytes and time.perf_counter() - began < SECONDS:
            position += os.pwrite(descriptor, buffer, position)
        os.fsync(descriptor)
        speed = position / (time.perf_counter() - began)
        began = time.perf_counter()
        os.pwrite(descriptor, buffer[:BLOCK] if not _is_direct(descriptor) else buffer, 0)
        os.fsync(descriptor)
        return speed, time.perf_counter() - began
    finally:
        os.close(descriptor)
        buffer.close()
        if part is not None:
            part.unlink(missing_ok=True)


def _set_direct(descriptor: int) -> None:
    import fcntl

    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
    except OSError:  # tmpfs
        return


def _is_direct(descriptor: int) -> bool:
    import fcntl

    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def _random_reads(folder: Path, sample_bytes: int) -> float:
    """Blocks of 4 KiB per second, one at a time."""
    descriptor, part = unnamed_file(folder)
    try:
        os.pwrite(descriptor, os.urandom(2**20), 0)
        for position in range(0, sample_bytes, 2**20):
            os.pwrite(descriptor, os.urandom(2**20), position)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        descriptor = direct(descriptor)
        block, draw = mmap.mmap(-1, BLOCK), random.Random(0)
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < SECONDS / 2:
            count += os.preadv(descriptor, [block], draw.randrange(sample_bytes // BLOCK) * BLOCK) == BLOCK
        return count / (time.perf_counter() - began)
    finally:
        os.close(descriptor)
        if part is not None:
            part.unlink(missing_ok=True)


def renames(folder: Path) -> bool:
    """As checkpoints are written: to a temporary name, synced, renamed."""
    part = folder / f".check-{this_host()}-{os.getpid()}.part"
    final = part.with_suffix(".done")
    try:
        with part.open("wb") as stream:
            stream.write(b"windlass")
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(final)
        return final.read_bytes() == b"windlass" and not part.exists()
    except OSError:
        return False
    finally:
        part.unlink(missing_ok=True)
        final.unlink(missing_ok=True)
