"""The manifest of a checkpoint: its model, recipe and step, and the size and checksum of every file.

Written last, before a checkpoint is renamed: a directory without a manifest is incomplete.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from windlass.errors import BadCheckpoint, BadInput
from windlass.model.formats.disk.atomic import write_atomically

MANIFEST = "manifest.json"
VERSION = 1
_CHUNK_BYTES = 2**22


class CheckpointIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """The model, data and recipe of a checkpoint."""

    model: str
    """Name of the model."""
    spec: str
    """Digest of the ModelSpec; a checkpoint loads only into the same one."""
    data: str = ""
    """Digest of the training data, which sample numbers refer to."""
    config: dict[str, Any] = {}
    """config.json, as it will be exported."""
    recipe: dict[str, Any] = {}
    """The whole recipe, so that a checkpoint is self-contained."""


class CheckpointFile(msgspec.Struct, frozen=True):
    num_bytes: int
    sha256: str


class CheckpointManifest(msgspec.Struct, frozen=True, kw_only=True):
    identity: CheckpointIdentity
    step: int
    world_size: int
    files: dict[str, CheckpointFile]
    version: int = VERSION


def spec_digest(spec: msgspec.Struct) -> str:
    """Of a ModelSpec without its name."""
    unnamed = msgspec.structs.replace(spec, name="")
    return hashlib.sha256(msgspec.json.encode(unnamed, order="sorted")).hexdigest()


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    write_atomically(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")


def read_manifest(folder: Path) -> CheckpointManifest:
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=CheckpointManifest)
    except OSError as error:
        raise BadCheckpoint(f"cannot be read: {error.strerror}", folder / MANIFEST) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadCheckpoint(f"is damaged: {error}", folder / MANIFEST) from None
    if manifest.version != VERSION:
        raise BadCheckpoint(f"has version {manifest.version}; this Windlass reads version {VERSION}", folder / MANIFEST)
    for name in manifest.files:
        if "/" in name or "\0" in name or name in ("", ".", ".."):
            raise BadCheckpoint(f"lists {name!r}, which is not a plain file name", folder / MANIFEST)
    return manifest


def file_digest(path: Path) -> CheckpointFile:
    found, num_bytes = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            found.update(chunk)
            num_bytes += len(chunk)
    return CheckpointFile(num_bytes, found.hexdigest())


def check_sizes(folder: Path, manifest: CheckpointManifest) -> None:
    """Checks that every file exists with its size, without reading it."""
    for name, expected in manifest.files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            raise BadCheckpoint(f"cannot be read: {error.strerror}", folder / name) from None
        if found != expected.num_bytes:
            raise BadCheckpoint(f"has {found:,} bytes instead of {expected.num_bytes:,}", folder / name)


def is_complete(folder: Path) -> bool:
    """Whether all files are there with their sizes."""
    try:
        check_sizes(folder, read_manifest(folder))
    except BadCheckpoint:
        return False
    return True


def check_files(folder: Path, manifest: CheckpointManifest, names: Iterable[str]) -> None:
    """Verifies the checksums of these files."""
    for name in names:
        try:
            found = file_digest(folder / name)
        except OSError as error:
            raise BadCheckpoint(f"cannot be read: {error.strerror}", folder / name) from None
        if found != manifest.files[name]:
            raise BadCheckpoint("is damaged: its checksum differs from the manifest", folder / name)


def check_model(folder: Path, found: CheckpointIdentity, wanted: CheckpointIdentity) -> None:
    if found.spec != wanted.spec:
        other = found.model if found.model != wanted.model else f"a different {found.model}"
        raise BadInput(
            f"{folder} is a checkpoint of {other}, not of the recipe's {wanted.model}; "
            "choose another folder with --out, or use the recipe it was made with"
        )
