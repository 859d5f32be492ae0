"""What a checkpoint says of itself: which model and recipe it belongs to, how far the run was, and what each of its files must be.

The manifest is the last file written before a checkpoint gets its name, so a folder without one is not whole. Knows nothing of
what the tensors are, nor of how they are cut over files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from windlass.errors import BadCheckpoint, BadInput
from windlass.formats.disk.atomic import write_atomically

MANIFEST = "manifest.json"
VERSION = 1
_CHUNK_BYTES = 2**22


class CheckpointIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint belongs to."""

    model: str
    """As people call it."""
    spec: str
    """A digest of what the model is; another one cannot take this checkpoint's tensors."""
    data: str = ""
    """A digest of what it is trained on: sample numbers mean something only there."""
    config: dict[str, Any] = {}
    """config.json, as it will be exported."""
    recipe: dict[str, Any] = {}
    """All of it, so that a checkpoint can be read without the file it was started from."""


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
    """Of a ModelSpec without its name: the same numbers under another name are the same model."""
    unnamed = msgspec.structs.replace(spec, name="")
    return hashlib.sha256(msgspec.json.encode(unnamed, order="sorted")).hexdigest()


def write_manifest(folder: Path, manifest: CheckpointManifest) -> None:
    write_atomically(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")


def read_manifest(folder: Path) -> CheckpointManifest:
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=CheckpointManifest)
    except OSError as error:
        raise BadCheckpoint(f"cannot be read: {error.strerror}", folder / MANIFEST) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadCheckpoint(f"is damaged: {error}", folder / MANIFEST) from None
    if manifest.version != VERSION:
        raise BadCheckpoint(f"has version {manifest.version}; this Windlass reads version {VERSION}", folder / MANIFEST)
    for name in manifest.files:
        if "/" in name or "\0" in name or name in ("", ".", ".."):
            raise BadCheckpoint(f"names {name!r}, which is no file of the folder", folder / MANIFEST)
    return manifest


def file_digest(path: Path) -> CheckpointFile:
    found, num_bytes = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            found.update(chunk)
            num_bytes += len(chunk)
    return CheckpointFile(num_bytes, found.hexdigest())


def check_sizes(folder: Path, manifest: CheckpointManifest) -> None:
    """What can be known without reading: every file is there and as long as it was."""
    for name, expected in manifest.files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            raise BadCheckpoint(f"cannot be read: {error.strerror}", folder / name) from None
        if found != expected.num_bytes:
            raise BadCheckpoint(f"has {found:,} bytes instead of {expected.num_bytes:,}", folder / name)


def check_files(folder: Path, manifest: CheckpointManifest, names: Iterable[str]) -> None:
    """Reads the files named and compares what they hold."""
    for name in names:
        try:
            found = file_digest(folder / name)
        except OSError as error:
            raise BadCheckpoint(f"cannot be read: {error.strerror}", folder / name) from None
        if found != manifest.files[name]:
            raise BadCheckpoint("is damaged: its checksum is not the manifest's", folder / name)


def check_model(folder: Path, found: CheckpointIdentity, wanted: CheckpointIdentity) -> None:
    if found.spec != wanted.spec:
        other = f"{found.model}" if found.model != wanted.model else f"a {found.model} of other numbers"
        raise BadInput(
            f"{folder} is a checkpoint of {other}, not of the recipe's {wanted.model}; "
            "choose another folder with --out, or the recipe it was made with"
        )
