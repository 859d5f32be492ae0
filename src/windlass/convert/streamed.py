"""A model that is still on the hub: files arrive one after another and are deleted when their tensors are done.

Implements core.ports.TensorStore. Two files are on disk at most beside the one that is arriving, so the disk never holds the
source and the result together.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any

import msgspec

from windlass.errors import BadCheckpoint, Error
from windlass.formats.config import read_config
from windlass.formats.hub.hub import RemoteModel, RemoteTensor, fetch_small_files, list_files, remote_tensors, stream_shards
from windlass.formats.safetensors.store import SafetensorsStore
from windlass.weights.source import COMPANIONS, OpenedModel, opened_store

if TYPE_CHECKING:
    import torch

MOST_OPEN = 2


def open_streamed(name: str, directory: Path) -> OpenedModel:
    """A model of the hub, to be converted while it arrives."""
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
        """Which files, in the order they arrive, hold these tensors."""
        return sorted({self._order[self._tensors[name].file] for name in names if name in self._tensors})

    @property
    def most_bytes(self) -> int:
        """What the disk holds of it at most."""
        return sum(sorted(file.num_bytes for file in self.model.files)[-MOST_OPEN - 1 :])

    def begin(self, needed: Collection[int]) -> None:
        """Starts the downloads of these files; each must be released one day, or the next but one would never come."""
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
        except Exception as error:  # noqa: BLE001 - the outermost edge of a thread; raised again by whoever reads
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
            raise BadCheckpoint("the downloaded file differs from what the hub said of it", tensor.file, name)
        return store.read(name, start, stop)

    def release(self, index: int) -> None:
        """Everything of this file is on disk in its new form."""
        file = self.model.shards[index]
        with self._changed:
            opened = self._open.pop(file, None)
            self._changed.notify_all()
        if opened is not None:
            opened.close()
        (self.directory / file).unlink(missing_ok=True)  # or an earlier run was killed before it could

    def remove(self) -> None:
        """What is left: small files, which the result has by now."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for opened in self._open.values():
                opened.close()
