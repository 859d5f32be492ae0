"""A rank's files from its node's disk to the shared folder: copied, read back, compared; only then the local copy goes. No torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from windlass.errors import BadCheckpoint
from windlass.formats.disk import explained, sync_directory
from windlass.train.checkpoint.manifest import StoredFile, file_digest


def bring_together(local: Path, shared: Path, files: Mapping[str, StoredFile]) -> None:
    for name, expected in files.items():
        _copy(local / name, shared / name, expected)
    sync_directory(shared)
    for name in files:
        (local / name).unlink()
    _remove_if_empty(local)


def _copy(source: Path, target: Path, expected: StoredFile) -> None:
    with explained(target, expected.num_bytes):
        shutil.copyfile(source, target)
        descriptor = os.open(target, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    found = file_digest(target)
    if found != expected:
        raise BadCheckpoint("arrived damaged: its checksum is not that of the local copy, which stays", target)


def _remove_if_empty(folder: Path) -> None:
    """Ranks of one node share it; the last of them removes it."""
    try:
        folder.rmdir()
    except OSError:
        return
