"""A rank's files from its node's disk to the shared folder: copied, read back, compared; only then the local copy goes. No torch.

Beside them lies a list of what the rank wrote and what it belongs to. Should the shared folder be out of reach, files and list stay,
and `consolidate` brings them together later, from whatever host they are on.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from windlass.errors import BadCheckpoint
from windlass.formats.disk.atomic import sync_directory, write_atomically, write_errors
from windlass.train.checkpoint.manifest import Identity, StoredFile, file_digest

PARTS = re.compile(r"__(\d+)\.parts\.json")


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank wrote of a checkpoint."""

    identity: Identity
    step: int
    rank: int
    world_size: int
    files: dict[str, StoredFile]


def parts_name(rank: int) -> str:
    return f"__{rank}.parts.json"


def write_parts(local: Path, parts: Parts) -> None:
    write_atomically(local / parts_name(parts.rank), msgspec.json.encode(parts) + b"\n")


def bring_together(local: Path, shared: Path, files: Mapping[str, StoredFile]) -> None:
    """Copies; what is local stays until `remove_parts`, when all ranks have arrived."""
    for name, expected in files.items():
        copy_checked(local / name, shared / name, expected)
    sync_directory(shared)


def copy_checked(source: Path, target: Path, expected: StoredFile) -> None:
    with write_errors(target, expected.num_bytes):
        shutil.copyfile(source, target)
    sync_and_check(target, expected)


def sync_and_check(target: Path, expected: StoredFile) -> None:
    with write_errors(target, expected.num_bytes):
        descriptor = os.open(target, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    if file_digest(target) != expected:
        raise BadCheckpoint("arrived damaged: its checksum is not that of the local copy, which stays", target)


def remove_parts(local: Path, rank: int, files: Mapping[str, StoredFile]) -> None:
    """The list goes first: without it nobody takes the files for a part of anything. Ranks of one node share the folder."""
    with suppress(OSError):  # a disk that fails costs room; a rank that raised here would leave the others waiting
        for name in (parts_name(rank), *files):
            (local / name).unlink(missing_ok=True)
        local.rmdir()


def clear_unlisted(local: Path) -> None:
    """What a killed run was writing: no rank has listed it, so nothing can ever be made of it, and it takes room."""
    for folder in local.glob("step-*.tmp"):
        if not any(PARTS.fullmatch(file.name) for file in folder.glob("__*.parts.json")):
            shutil.rmtree(folder, ignore_errors=True)


def forget_older(local: Path, newest: Parts) -> None:
    """Parts that never reached the shared folder would fill the disk; the newest of each rank is enough."""
    for file in local.glob(f"step-*.tmp/{parts_name(newest.rank)}"):
        try:
            found = msgspec.json.decode(file.read_bytes(), type=Parts)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            continue
        if found.step < newest.step:
            remove_parts(file.parent, found.rank, {name: stored for name, stored in found.files.items() if "/" not in name})
