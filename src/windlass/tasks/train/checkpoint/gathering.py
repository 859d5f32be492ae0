"""Copies a rank's files from its local disk to the shared folder and verifies them; the local copy is removed after that. No torch.

A list of the rank's files is kept beside them. If the shared folder cannot be reached, files and list stay, and `consolidate` collects
them later from the hosts.
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
from windlass.model.formats.disk.atomic import sync_directory, write_atomically, write_errors
from windlass.tasks.train.checkpoint.manifest import CheckpointFile, CheckpointIdentity, file_digest

PARTS = re.compile(r"__(\d+)\.parts\.json")


class RankFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The files that one rank wrote for a checkpoint."""

    identity: CheckpointIdentity
    step: int
    rank: int
    world_size: int
    files: dict[str, CheckpointFile]


def parts_name(rank: int) -> str:
    return f"__{rank}.parts.json"


def write_parts(local: Path, parts: RankFiles) -> None:
    write_atomically(local / parts_name(parts.rank), msgspec.json.encode(parts) + b"\n")


def copy_to_shared(local: Path, shared: Path, files: Mapping[str, CheckpointFile]) -> None:
    """The local files stay until `remove_parts`, after all ranks have copied."""
    for name, expected in files.items():
        copy_checked(local / name, shared / name, expected)
    sync_directory(shared)


def copy_checked(source: Path, target: Path, expected: CheckpointFile) -> None:
    with write_errors(target, expected.num_bytes):
        shutil.copyfile(source, target)
    sync_and_check(target, expected)


def sync_and_check(target: Path, expected: CheckpointFile) -> None:
    with write_errors(target, expected.num_bytes):
        descriptor = os.open(target, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    if file_digest(target) != expected:
        raise BadCheckpoint("was damaged while copying: its checksum differs from the local copy, which is kept", target)


def remove_parts(local: Path, rank: int, files: Mapping[str, CheckpointFile]) -> None:
    """Removes the list first: files without a list are ignored. Ranks of one node share the folder."""
    with suppress(OSError):  # a failing disk only wastes space; an exception here would leave other ranks waiting
        for name in (parts_name(rank), *files):
            (local / name).unlink(missing_ok=True)
        local.rmdir()


def remove_unlisted(local: Path) -> None:
    """Removes what a killed run was writing: without a list it is unusable."""
    for folder in local.glob("step-*.tmp"):
        if not any(PARTS.fullmatch(file.name) for file in folder.glob("__*.parts.json")):
            shutil.rmtree(folder, ignore_errors=True)


def remove_older(local: Path, newest: RankFiles) -> None:
    """Removes older parts that never reached the shared folder; the newest of each rank is enough."""
    for file in local.glob(f"step-*.tmp/{parts_name(newest.rank)}"):
        try:
            found = msgspec.json.decode(file.read_bytes(), type=RankFiles)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        if found.step < newest.step:
            remove_parts(file.parent, found.rank, {name: stored for name, stored in found.files.items() if "/" not in name})
