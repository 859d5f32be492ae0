"""Weights that are on their way: native threads read them while the decoder is built, kernels are compiled and graphs captured.

Matrices have their final addresses at once, and are zero until they arrive, a part at a time: what is computed with them before the end is
meaningless, but finite. Takes what a file stores as the device needs it, or as codes for tiles; the rest is loaded as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import cast

import torch
from torch import Tensor

from windlass.core.ports import FileStore, TensorStore
from windlass.model.formats.dtypes import torch_dtype
from windlass.runtime.kernels.cuda.layout import Tiles
from windlass.runtime.kernels.program.loader import Chunk, DeviceSide, Loader, LoaderState
from windlass.runtime.weights.load.chunks import plain_chunks, tile_chunks
from windlass.runtime.weights.tensors.readers import row_selection
from windlass.runtime.weights.tensors.shards import TensorShard

SECONDS_BETWEEN_PROGRESS = 0.05


class BackgroundLoad:
    def __init__(self, side: DeviceSide, progress: Callable[[], None] | None = None) -> None:
        """`progress` is called from a thread, a few times a second."""
        self._loader = Loader(side)
        self._submitted = 0
        self._progress, self._stop = progress, Event()
        self._telling = Thread(target=self._tell, name="load-progress", daemon=True)
        self._telling.start()

    def put_tiles(self, store: TensorStore, rows_of: Sequence[Sequence[TensorShard]], tiles: Tiles) -> bool:
        """For each matrix its shards, concatenated along the output. False: they are to be read in another way."""
        if not has_files(store) or not all(_is_packed(shard) for one in rows_of for shard in one):
            return False
        tiles.data.zero_()
        self._submit(list(tile_chunks(self._finder(store), rows_of, tiles, self._loader.slot_bytes)), tiles.data)
        return True

    def put_plain(self, store: TensorStore, shard: TensorShard, out: Tensor) -> bool:
        """A matrix that is stored in the device's dtype. False: it is to be read in another way."""
        if not has_files(store) or not _is_plain(store, shard, out):
            return False
        out.zero_()
        number, start = self._finder(store)(shard.location.name)
        place = number, start + shard.rows[0] * out.shape[-1] * out.itemsize
        self._submit(list(plain_chunks(place, out.nbytes, out.data_ptr(), self._loader.slot_bytes)), out)
        return True

    @property
    def num_waiting(self) -> int:
        """Bytes that were asked for and are not read yet."""
        return self._submitted - self.state.num_bytes

    @property
    def state(self) -> LoaderState:
        return self._loader.state()

    def finish(self) -> None:
        """Returns when all is on the device; raises what went wrong."""
        try:
            self._loader.finish()
        finally:
            self.close()

    def close(self) -> None:
        """Leaves out what was not begun. May be called twice."""
        self._stop.set()
        self._telling.join()
        self._loader.close()

    def _submit(self, chunks: list[Chunk], out: Tensor) -> None:
        if out.is_cuda:
            torch.cuda.current_stream(out.device).synchronize()  # the zeros are written first
        self._submitted += sum(chunk.size for chunk in chunks)
        self._loader.submit(chunks)

    def _finder(self, store: TensorStore) -> Callable[[str], tuple[int, int]]:
        files, loader = cast(FileStore, store), self._loader

        def find(name: str) -> tuple[int, int]:
            path, start = files.place_of(name)
            return loader.file(path), start

        return find

    def _tell(self) -> None:
        while self._progress is not None and not self._stop.wait(SECONDS_BETWEEN_PROGRESS):
            try:
                self._progress()
            except Exception:  # noqa: BLE001 - the same error is raised where the end is waited for
                return


def has_files(store: TensorStore) -> bool:
    return hasattr(store, "place_of")


def _is_packed(shard: TensorShard) -> bool:
    """Whole rows that lie together."""
    where = shard.location
    return where.packed and not where.stacked and shard.whole_rows and row_selection(shard.tensor, where) is None


def _is_plain(store: TensorStore, shard: TensorShard, out: Tensor) -> bool:
    where = shard.location
    return (
        not (where.packed or where.stacked or where.transposed or where.source.encoding)
        and shard.whole_rows
        and row_selection(shard.tensor, where) is None
        and store.dtype(where.name) not in ("F8_E4M3", "I8")
        and torch_dtype(store.dtype(where.name)) is out.dtype
        and out.is_contiguous()
    )
