"""Is it the same checkpoint? Told from its files without reading all of them. No torch.

Contents are sampled: config, sizes, and thousands of places spread over the files. Any training, conversion or download gives other bytes
almost everywhere; what is not told apart is a copy in which single rows were edited, and so a worker's cache goes by the times of the files too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from windlass.core.model import Frozen
from windlass.weights.files import model_file, weight_files

SAMPLES = 4096
"""Over all files: 16 MiB at most, in under a second from a solid-state disk."""
SAMPLE_BYTES = 4096


class CheckpointIdentity(Frozen):
    fingerprint: str
    """Of the contents: equal on every machine that has the same files, whenever they were written there."""
    key: str
    """Of these files as they are now."""


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
    """The beginning, where headers are, the end, and evenly between; all of a small file."""
    with file.open("rb") as stream:
        if size <= places * SAMPLE_BYTES:
            take(stream.read())
            return
        for place in range(places):
            take(os.pread(stream.fileno(), SAMPLE_BYTES, (size - SAMPLE_BYTES) * place // max(places - 1, 1)))
