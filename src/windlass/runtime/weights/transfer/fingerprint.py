"""Fingerprint of a checkpoint from a sample of its bytes. No torch.

Hashes the config, file sizes and thousands of samples spread over the files. Training, conversion or another download change bytes
almost everywhere; a copy with single rows edited may not be detected, so a worker's cache key includes modification times too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from windlass.core.model import Frozen
from windlass.runtime.weights.files import model_file, weight_files

SAMPLES = 4096
"""Over all files: at most 16 MiB, under a second from an SSD."""
SAMPLE_BYTES = 4096


class CheckpointIdentity(Frozen):
    fingerprint: str
    """Of the contents: equal on every machine with the same files."""
    key: str
    """Cache key: contents and modification times on this machine."""


def identity(path: Path) -> CheckpointIdentity:
    """Of a model directory, a .gguf or a .m file."""
    found = model_file(path)
    files = weight_files(found)
    contents = hashlib.sha256(_config(found))
    edition = hashlib.sha256()
    sizes = {file: file.stat().st_size for file in files}
    total = sum(sizes.values())
    for file in files:
        state = file.stat()
        contents.update(f"{file.name if found.is_dir() else file.suffix} {state.st_size}\n".encode())
        edition.update(f"{state.st_size} {state.st_mtime_ns}\n".encode())
        _sample(contents.update, file, state.st_size, max(SAMPLES * state.st_size // max(total, 1), 2))
    fingerprint = contents.hexdigest()
    edition.update(fingerprint.encode())
    return CheckpointIdentity(fingerprint=fingerprint, key=edition.hexdigest()[:40])


def _config(found: Path) -> bytes:
    file = found / "config.json"
    return file.read_bytes() if found.is_dir() and file.is_file() else b""


def _sample(take: Callable[[bytes], None], file: Path, size: int, places: int) -> None:
    """Evenly spaced samples from the header to the end; all of a small file."""
    with file.open("rb") as stream:
        if size <= places * SAMPLE_BYTES:
            take(stream.read())
            return
        for place in range(places):
            take(os.pread(stream.fileno(), SAMPLE_BYTES, (size - SAMPLE_BYTES) * place // max(places - 1, 1)))
