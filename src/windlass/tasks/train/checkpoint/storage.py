"""DCP storage with checksums, and without arbitrary pickles.

DCP pickles its metadata and everything that is not a tensor. A checkpoint may be untrusted, so the metadata is read by an unpickler that
allows only DCP's classes, and the rest with `weights_only`.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter, Metadata
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo  # pyright: ignore[reportPrivateUsage]
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from windlass.errors import BadCheckpoint
from windlass.model.formats.disk.atomic import sync_directory
from windlass.tasks.train.checkpoint.manifest import CheckpointFile, file_digest

CONTENTS = ".metadata"
KEEPING = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
"""Of a pickle: keep a value under a number."""


class CheckedWriter(FileSystemWriter):
    """Writes one file per rank, and records its checksum."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True, overwrite=True)
        self.folder = folder
        self.written: dict[str, CheckpointFile] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            future = super().write_data(plan, planner)
            future.wait()
        except RuntimeError as error:
            raise _first_cause(error) from None
        for path in sorted(self.folder.glob(f"{plan.storage_data.prefix}*.distcp")):
            self.written[path.name] = file_digest(path)
        sync_directory(self.folder)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator only, after all ranks have written."""
        super().finish(metadata, results)
        self.written[CONTENTS] = file_digest(self.folder / CONTENTS)
        sync_directory(self.folder)

    def storage_meta(self) -> StorageMeta:
        """Without the path, which changes when the directory is renamed."""
        return StorageMeta(save_id=self.save_id)


def _first_cause(error: BaseException) -> BaseException:
    """If a write fails, torch.save fails again on closing; the disk error is further down the chain."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error


class SafeReader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / CONTENTS
        try:
            content = path.read_bytes()
        except OSError as error:
            raise BadCheckpoint(f"cannot be read: {error.strerror}", path) from None
        try:
            _check_sizes(content)
            found = _Contents(io.BytesIO(content)).load()
        except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
            raise BadCheckpoint(f"is damaged: {error}", path) from None
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
            raise BadCheckpoint("is not DCP metadata", path)
        _refuse_paths(path, found)
        found.storage_meta = StorageMeta(load_id=self.load_id)
        return found


def _check_sizes(content: bytes) -> None:
    """A few bytes of a pickle could otherwise ask for any memory: by the number under which a value is kept, or an array without content."""
    for operation, argument, _ in pickletools.genops(content):
        if operation.name == "BYTEARRAY8" or (operation.name in KEEPING and int(argument or 0) > len(content)):
            raise pickle.UnpicklingError(f"{operation.name} of {argument!r:.40} in {len(content):,} bytes")


def _refuse_paths(path: Path, found: Metadata) -> None:
    for stored in found.storage_data.values():
        if not isinstance(stored, _StorageInfo) or not isinstance(getattr(stored, "relative_path", None), str):
            raise BadCheckpoint("is not DCP metadata", path)
        if "/" in stored.relative_path or stored.relative_path in ("", ".", ".."):
            raise BadCheckpoint(f"lists {stored.relative_path!r}, which is not a plain file name", path)


_ALLOWED = frozenset(
    {
        *(("torch.distributed.checkpoint.metadata", name) for name in (
            "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata",
            "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING",
        )),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
    }
)  # fmt: skip


class _Contents(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which is not allowed in DCP metadata")


class SafePlanner(DefaultLoadPlanner):
    """Loads non-tensor values only if they are plain: numbers, text, lists and dictionaries."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise BadCheckpoint(f"holds more than plain values: {str(error).splitlines()[0]}", tensor=name) from None
        set_element(self.original_state_dict, self.mappings[name], loaded)


def missing(state_names: set[str], folder: Path) -> set[str]:
    """State names that the checkpoint does not have."""
    return state_names - SafeReader(folder).read_metadata().state_dict_metadata.keys()
