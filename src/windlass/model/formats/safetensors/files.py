"""Finds the weight files of a checkpoint directory and reads its index. Refuses paths that lead out of the directory.

Reads no headers and no weights.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path, PurePosixPath

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.errors import BadCheckpoint, BadInput
from windlass.model.formats.safetensors.header import MAX_HEADER_BYTES, repeated_key

SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
SECOND_COPY = "consolidated"
"""Some repositories contain the weights a second time under this prefix, in another layout."""


class _Index(msgspec.Struct):
    """`metadata` is ignored; it repeats what the files say."""

    weight_map: msgspec.Raw


def read_index(index: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    try:
        if index.stat().st_size > MAX_HEADER_BYTES:
            raise BadCheckpoint(f"is not a safetensors index: more than {MAX_HEADER_BYTES} bytes", index)
        text = index.read_bytes()
        raw = msgspec.json.decode(text, type=_Index).weight_map
        weight_map = msgspec.json.decode(raw, type=dict[str, str])
        name = _repeated_key(text, bytes(raw), len(weight_map))
    except DECODE_ERRORS as error:
        raise BadCheckpoint(f"{index} is not a safetensors index: {error}") from None
    except OSError as error:
        raise BadCheckpoint(f"cannot be read: {error.strerror}", index) from None
    if name is not None:
        raise BadCheckpoint(
            "is listed twice in the index", index, name, max(text.find(f'"{name}"'.encode("utf-8", "replace")), 0)
        )
    return weight_map


def _repeated_key(text: bytes, weight_map: bytes, num_names: int) -> str | None:
    """As `repeated_key`, without parsing the names once more where they have no more colons than distinct keys."""
    if weight_map.count(b":") == num_names and repeated_key(text.replace(weight_map, b"null", 1)) is None:
        return None
    return repeated_key(text)


def safetensors_files(directory: Path) -> list[str]:
    """File names in the directory, without duplicates of the weights and hidden files."""
    names = sorted(file.name for file in directory.glob("*.safetensors"))
    return [name for name in names if not name.startswith((".", SECOND_COPY))]


def torch_files(directory: Path) -> list[str]:
    return sorted(file.name for file in directory.glob("pytorch_model*.bin"))


def missing_files(directory: Path, named: Collection[str]) -> list[str]:
    return [name for name in sorted(named) if not os.path.exists(directory / name)]  # noqa: PTH110 - Path's raises for a name that is too long


def file_within(directory: Path, name: str) -> Path:
    """The resolved path, after checking that neither its name nor a symlink leads out of the directory."""
    relative = PurePosixPath(name)
    if not name or relative.is_absolute() or ".." in relative.parts or "\0" in name:
        raise BadCheckpoint(f"the index lists {name!r}, which is outside the directory", directory)
    try:
        real = (directory / relative).resolve(strict=True)
        regular = stat.S_ISREG(real.stat().st_mode)
    except (OSError, RuntimeError):  # RuntimeError: symlink loop, before Python 3.13
        raise BadCheckpoint("cannot be opened: missing, or a broken symlink", directory / name) from None
    if not any(real.is_relative_to(root) for root in _roots(directory)):
        raise BadCheckpoint(
            f"symlink out of the model directory, to {real}; copy the file there if you trust it", directory / name
        )
    if not regular:  # opening a pipe would block
        raise BadCheckpoint("not a regular file", directory / name)
    return real


def _roots(directory: Path) -> list[Path]:
    """The directory; in a hub cache (models--X/snapshots/REVISION) also the blobs its files link to."""
    real = directory.resolve()
    repository = real.parent.parent
    if real.parent.name == "snapshots" and repository.name.startswith("models--"):
        return [real, repository / "blobs", repository / "snapshots", repository.parent / "blobs"]  # the last is shared by models
    return [real]


def no_weights_error(directory: Path) -> BadInput:
    looked_for = f"{SAFETENSORS_INDEX}, *.safetensors, {TORCH_INDEX}, pytorch_model*.bin"
    if any(directory.glob(f"{SECOND_COPY}*.safetensors")):
        return BadInput(
            f"{directory} has only {SECOND_COPY}*.safetensors, not the Hugging Face layout; download its model*.safetensors"
        )
    return BadInput(f"{directory} contains no weights; looked for {looked_for}")
