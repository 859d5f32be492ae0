"""The weights that an epoch needs on this machine: a local checkpoint, cached pieces, or pieces received from the root."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.errors import BadInput, Error
from windlass.runtime.fleet.protocol import messages
from windlass.runtime.fleet.worker.config import WorkerLog
from windlass.units import format_bytes

if TYPE_CHECKING:
    from windlass.runtime.fleet.transfer.cache import CacheEntry, WeightCache
    from windlass.runtime.fleet.worker.local_checkpoints import LocalCheckpoints
    from windlass.runtime.weights.tensors.slices import Slice

MAX_WAITING = 8
"""Received pieces that are not on disk yet; beyond that, backpressure."""
SECONDS_BETWEEN_PROGRESS = 0.25
KEY = re.compile(r"[\w-]{8,128}", re.ASCII)

Incoming = messages.PieceData | messages.PiecesEnd | messages.PiecesFailed


@dataclass
class PreparedWeights:
    """What the ranks read; locked until it is closed."""

    model: str = ""
    """Path of a local checkpoint."""
    folder: str = ""
    """A folder of the weight cache."""
    held_bytes: int = 0
    received_bytes: int = 0
    use: CacheEntry | None = None

    def close(self) -> None:
        if self.use is not None:
            self.use.close()


class WeightReceiver:
    def __init__(self, prepare: messages.PrepareWeights, channel: Any, log: WorkerLog) -> None:
        self.epoch = prepare.epoch
        self._prepare, self._channel, self._log = prepare, channel, log
        self._queue: asyncio.Queue[Incoming | None] = asyncio.Queue(MAX_WAITING)
        self._is_stopped = False
        self._last_report = float("-inf")

    async def take(self, message: Incoming) -> None:
        if not self._is_stopped:
            await self._queue.put(message)

    def stop(self) -> None:
        """Makes `run` end soon."""
        self._is_stopped = True
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)

    async def run(self, cache: WeightCache, local: LocalCheckpoints) -> PreparedWeights:
        """Raises Error with a message for the root."""
        found = await asyncio.to_thread(local.find, self._prepare.fingerprint, self._prepare.path)
        if found is not None:
            self._log.line(f"epoch {self.epoch}: reading {self._prepare.catalogue.name} from {found}")
            return PreparedWeights(model=str(found))
        use, missing = await asyncio.to_thread(self._open_cache, cache)
        try:
            return await self._receive(use, missing)
        except BaseException:
            use.close()
            raise

    def _open_cache(self, cache: WeightCache) -> tuple[CacheEntry, list[Slice]]:
        if not KEY.fullmatch(self._prepare.catalogue.key):  # it becomes a folder name
            raise BadInput(f"{self._prepare.catalogue.key[:80]!r} is not a valid checkpoint key")
        use = cache.using(self._prepare.catalogue)
        try:
            missing = use.missing(self._prepare.slices)
            use.make_room(self._prepare.slices)
        except BaseException:
            use.close()
            raise
        return use, missing

    async def _receive(self, use: CacheEntry, missing: list[Slice]) -> PreparedWeights:
        name = self._prepare.catalogue.name
        all_bytes, total = use.num_bytes(self._prepare.slices), use.num_bytes(missing)
        if not missing:
            self._log.line(f"epoch {self.epoch}: all {format_bytes(all_bytes)} of {name} are cached")
        else:
            self._log.line(
                f"epoch {self.epoch}: receiving {format_bytes(total)} of the {format_bytes(all_bytes)} needed of {name}"
            )
            await self._receive_missing(use, missing, total)
        folder = await asyncio.to_thread(use.store, self._prepare.slices)
        return PreparedWeights(folder=folder, held_bytes=all_bytes, received_bytes=total, use=use)

    async def _receive_missing(self, use: CacheEntry, missing: list[Slice], total: int) -> None:
        began, done = time.monotonic(), 0
        self._channel.post(messages.PiecesRequest(self.epoch, missing))
        while (message := await self._queue.get()) is not None and not isinstance(message, messages.PiecesEnd):
            if isinstance(message, messages.PiecesFailed):
                raise BadInput(f"the root cannot read the missing weights: {message.reason}")
            await asyncio.to_thread(use.keep, message.piece)
            done += len(message.piece.data)
            self._report(done, total, began)
        if message is None:
            raise Error("the epoch was ended while weights were received")
        seconds = max(time.monotonic() - began, 1e-3)
        self._channel.post(messages.TransferProgress(self.epoch, done, total))
        self._log.line(f"epoch {self.epoch}: received {format_bytes(done)} in {seconds:.1f} s ({done / seconds / 1e6:.0f} MB/s)")

    def _report(self, done: int, total: int, began: float) -> None:
        now = time.monotonic()
        if now - self._last_report < SECONDS_BETWEEN_PROGRESS:
            return
        self._last_report = now
        speed = done / max(now - began, 1e-3)
        self._channel.post(messages.TransferProgress(self.epoch, done, total))
        self._log.show_status(
            f"epoch {self.epoch}: {format_bytes(done)} of {format_bytes(total)} received, {speed / 1e6:.0f} MB/s"
        )
