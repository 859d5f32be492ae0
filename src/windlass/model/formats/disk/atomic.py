"""Atomic writes: a crash at any moment leaves the old file or the new one. Checks free space before starting."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from windlass.errors import BadInput, DoesNotFit
from windlass.units import format_bytes


def require_free(path: Path, num_bytes: int) -> None:
    """Raises DoesNotFit unless the disk of `path` has `num_bytes` free."""
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    free_bytes = shutil.disk_usage(existing).free
    if free_bytes < num_bytes:
        short = num_bytes - free_bytes
        needs = f"{path} needs {format_bytes(num_bytes)}, {format_bytes(free_bytes)} are free"
        raise DoesNotFit(f"not enough disk space: {needs}; free {format_bytes(short)} or choose another directory", short)


@contextmanager
def write_errors(path: Path, num_bytes: int) -> Generator[None]:
    """Turns OSError into DoesNotFit (disk full) or BadInput."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DoesNotFit(
                f"disk full: {path} needs {format_bytes(num_bytes)} more; free some and run it again", num_bytes
            ) from None
        raise BadInput(f"{path} cannot be written: {error.strerror}") from None


def write_fully(descriptor: int, buffer: memoryview, position: int) -> None:
    while len(buffer):
        written = os.pwrite(descriptor, buffer, position)
        position += written
        buffer = buffer[written:]


def sync_directory(directory: Path) -> None:
    """fsyncs the directory, without which a rename may be lost."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def part_name(path: Path) -> Path:
    """Temporary name: hidden, with a suffix that no checkpoint reader looks for."""
    return path.with_name(f".{path.name}.part")


def write_atomically(path: Path, content: bytes) -> None:
    """For small files: configs, indexes, reports."""
    part = part_name(path)
    with write_errors(path, len(content)):
        with part.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
        sync_directory(path.parent)
