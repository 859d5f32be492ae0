"""A model on the hub as a TensorStore: its files are downloaded one after another and deleted when their tensors are converted.

At most two files are on disk besides the one being downloaded, so the disk never holds source and output together.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any

import msgspec

from windlass.errors import BadCheckpoint, Error
from windlass.model.formats.config import read_config
from windlass.model.formats.hub.hub import RemoteModel, RemoteTensor, fetch_small_files, list_files, remote_tensors, stream_shards
from windlass.model.formats.safetensors.store import SafetensorsStore
from windlass.runtime.weights.source import COMPANIONS, OpenedModel, opened_store

if TYPE_CHECKING:
    import torch

MOST_OPEN = 2


def open_streamed(name: str, directory: Path) -> OpenedModel:
    """A model on the hub, to be converted while it downloads."""
    model = list_files(name)
    store = StreamedStore(model, directory)
    companions = tuple(directory / file for file in COMPANIONS if (directory / file).is_file())
    found = opened_store(store, directory, companions, kind="hf")
    spec = msgspec.structs.replace(found.spec, name=name.split("/")[-1])
    return msgspec.structs.replace(
        found, spec=spec, digest=f"{model.name}@{model.revision}", name=name, num_bytes=model.num_bytes
    )


class StreamedStore:
    def __init__(self, model: RemoteModel, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        fetch_small_files(model, directory)
        self.model, self.directory = model, directory
        self.config: dict[str, Any] = read_config(directory)
        self._tensors: dict[str, RemoteTensor] = {tensor.name: tensor for tensor in remote_tensors(model)}
        self._order = {file: index for index, file in enumerate(model.shards)}
        self._open: dict[str, SafetensorsStore] = {}
        self._changed = Condition()
        self._failed: BaseException | None = None
        self._closed = False

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        return self._tensors[name].dtype

    def files_of(self, names: Iterable[str]) -> list[int]:
        """Indices, in download order, of the files that hold these tensors."""
        return sorted({self._order[self._tensors[name].file] for name in names if name in self._tensors})

    @property
    def most_bytes(self) -> int:
        """Peak disk use of the source."""
        return sum(sorted(file.num_bytes for file in self.model.files)[-MOST_OPEN - 1 :])

    def begin(self, needed: Collection[int]) -> None:
        """Starts downloading these files. Each must be released, or the one after the next is never downloaded."""
        skip = [file for file, index in self._order.items() if index not in needed]
        Thread(target=self._feed, args=(skip,), name="stream", daemon=True).start()

    def _feed(self, skip: list[str]) -> None:
        try:
            for path, _ in stream_shards(self.model, self.directory, skip):
                opened = SafetensorsStore(self.directory, [path.name])
                with self._changed:
                    self._open[path.name] = opened
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: len(self._open) < MOST_OPEN or self._closed)
                    if self._closed:
                        return
        except Exception as error:  # noqa: BLE001 - the outermost edge of a thread; raised again in `read`
            with self._changed:
                self._failed = error
                self._changed.notify_all()

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        tensor = self._tensors[name]
        with self._changed:
            self._changed.wait_for(lambda: tensor.file in self._open or self._failed is not None or self._closed)
            if tensor.file not in self._open:
                raise (
                    self._failed
                    if isinstance(self._failed, Error)
                    else BadCheckpoint(str(self._failed or "closed"), tensor.file, name)
                )
            store = self._open[tensor.file]
        if store.shape(name) != tensor.shape or store.dtype(name) != tensor.dtype:
            raise BadCheckpoint(
                "the downloaded file differs from the metadata on the hub; run the command again", tensor.file, name
            )
        return store.read(name, start, stop)

    def release(self, index: int) -> None:
        """All tensors of this file have been converted and synced; deletes it."""
        file = self.model.shards[index]
        with self._changed:
            opened = self._open.pop(file, None)
            self._changed.notify_all()
        if opened is not None:
            opened.close()
        (self.directory / file).unlink(missing_ok=True)  # also left over from a run that was killed before this line

    def remove(self) -> None:
        """Removes the remaining small files; the output has its copies."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for opened in self._open.values():
                opened.close()
