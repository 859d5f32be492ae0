"""Collects checkpoints whose parts are on the disks of several hosts on a shared store. No torch.

A part is removed from its host only after the checkpoint is complete on the shared store and every file was verified there. If killed,
run it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from windlass.errors import BadCheckpoint
from windlass.model.formats.disk.atomic import require_free
from windlass.tasks.train.checkpoint import folder as folders
from windlass.tasks.train.checkpoint.gathering import RankFiles, parts_name, sync_and_check
from windlass.tasks.train.checkpoint.hosts import CheckpointHost, read_hostfile
from windlass.tasks.train.checkpoint.manifest import CheckpointFile, CheckpointManifest, read_manifest, write_manifest

__all__ = ["ConsolidatedStep", "consolidate", "read_hostfile"]

HostFiles = list[tuple[CheckpointHost, RankFiles]]


class ConsolidatedStep(msgspec.Struct, frozen=True):
    step: int
    num_files: int
    num_bytes: int
    num_hosts: int


def consolidate(
    local: Path, shared: Path, hosts: Sequence[CheckpointHost], notify: Callable[[str], None]
) -> list[ConsolidatedStep]:
    lock = folders.FolderLock(shared)
    try:
        found = _found(local, hosts, notify)
        return [one for step in sorted(found) if (one := _consolidate_step(step, found[step], local, shared, notify)) is not None]
    finally:
        lock.release()


def _found(local: Path, hosts: Sequence[CheckpointHost], notify: Callable[[str], None]) -> dict[int, HostFiles]:
    found: dict[int, HostFiles] = {}
    for host in hosts:
        for name, content in host.lists(local).items():
            try:
                parts = msgspec.json.decode(content, type=RankFiles)
                _refuse_paths(parts)
            except (msgspec.DecodeError, UnicodeDecodeError, BadCheckpoint, RecursionError) as error:
                notify(f"{host.name}: skipping {local / name}: {error}")
                continue
            found.setdefault(parts.step, []).append((host, parts))
    return found


def _refuse_paths(parts: RankFiles) -> None:
    for name in parts.files:
        if "/" in name or "\0" in name or name in ("", ".", ".."):
            raise BadCheckpoint(f"it lists {name!r}, which is not a plain file name")


def _consolidate_step(
    step: int, held: HostFiles, local: Path, shared: Path, notify: Callable[[str], None]
) -> ConsolidatedStep | None:
    absent = sorted(set(range(held[0][1].world_size)) - {parts.rank for _, parts in held})
    if absent or len({(parts.world_size, parts.identity.spec) for _, parts in held}) > 1:
        why = (
            f"no host has the parts of ranks {', '.join(map(str, absent[:8]))}"
            if absent
            else "its parts belong to different runs"
        )
        notify(f"skipping step {step}: {why}")
        return None
    files = {name: stored for _, parts in held for name, stored in parts.files.items()}
    if not _is_copied(shared, step, files):
        _copy(step, held, local, shared, files)
    for host, parts in held:
        folder = folders.temporary_path(local, step)
        host.remove([folder / parts_name(parts.rank), *(folder / name for name in parts.files)], folder)
    num_hosts = len({host.name for host, _ in held})
    return ConsolidatedStep(step, len(files), sum(stored.num_bytes for stored in files.values()), num_hosts)


def _is_copied(shared: Path, step: int, files: dict[str, CheckpointFile]) -> bool:
    """Whether it was copied before, and interrupted while removing the parts."""
    try:
        return read_manifest(shared / folders.step_name(step)).files == files
    except BadCheckpoint:
        return False


def _copy(step: int, held: HostFiles, local: Path, shared: Path, files: dict[str, CheckpointFile]) -> None:
    require_free(shared, sum(stored.num_bytes for stored in files.values()))
    target = folders.create_temporary(shared, step)
    for host, parts in held:
        for name, expected in parts.files.items():
            host.fetch(folders.temporary_path(local, step) / name, target / name)
            sync_and_check(target / name, expected)
    first = held[0][1]
    write_manifest(target, CheckpointManifest(identity=first.identity, step=step, world_size=first.world_size, files=files))
    folders.commit(shared, step)
