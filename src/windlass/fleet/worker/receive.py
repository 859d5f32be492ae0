"""The weights that an epoch needs on this machine: read where they lie, kept from before, or received, piece by piece, to the disk."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from windlass.errors import BadInput, Error
from windlass.fleet.protocol import messages
from windlass.fleet.worker.config import WorkerLog
from windlass.units import format_bytes

if TYPE_CHECKING:
    from windlass.fleet.transfer.cache import CacheEntry, WeightCache
    from windlass.fleet.worker.local_checkpoints import LocalCheckpoints
    from windlass.weights.tensors.slices import Slice

MAX_WAITING = 8
"""Pieces that have come and are not on the disk yet; the root waits while there are so many."""
SECONDS_BETWEEN_PROGRESS = 0.25
KEY = re.compile(r"[\w-]{8,128}", re.ASCII)

Incoming = messages.PieceData | messages.PiecesEnd | messages.PiecesFailed


@dataclass
class PreparedWeights:
    """What ranks are to read, for as long as it is not closed."""

    model: str = ""
    """A checkpoint of this machine."""
    parts: str = ""
    """A folder of the cache."""
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
        self._came: asyncio.Queue[Incoming | None] = asyncio.Queue(MAX_WAITING)
        self._is_stopped = False
        self._shown = 0.0

    async def take(self, came: Incoming) -> None:
        if not self._is_stopped:
            await self._came.put(came)

    def stop(self) -> None:
        """`run` ends as soon as it can."""
        self._is_stopped = True
        while not self._came.empty():
            self._came.get_nowait()
        self._came.put_nowait(None)

    async def run(self, cache: WeightCache, local: LocalCheckpoints) -> PreparedWeights:
        """Raises Error, in reason for the root."""
        found = await asyncio.to_thread(local.find, self._prepare.fingerprint, self._prepare.path)
        if found is not None:
            self._log.line(f"epoch {self.epoch}: weights of {self._prepare.catalogue.name} are read from {found}")
            return PreparedWeights(model=str(found))
        use, missing = await asyncio.to_thread(self._opened, cache)
        try:
            return await self._receive(use, missing)
        except BaseException:
            use.close()
            raise

    def _opened(self, cache: WeightCache) -> tuple[CacheEntry, list[Slice]]:
        if not KEY.fullmatch(self._prepare.catalogue.key):  # it becomes the name of a folder
            raise BadInput(f"a checkpoint cannot have the key {self._prepare.catalogue.key[:80]!r}")
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
            self._log.line(f"epoch {self.epoch}: all {format_bytes(all_bytes)} of {name} are here already")
        else:
            self._log.line(f"epoch {self.epoch}: receiving {format_bytes(total)} of {name}, {format_bytes(all_bytes)} in all")
            await self._keep(use, missing, total)
        parts = await asyncio.to_thread(use.store, self._prepare.slices)
        return PreparedWeights(parts=parts, held_bytes=all_bytes, received_bytes=total, use=use)

    async def _keep(self, use: CacheEntry, missing: list[Slice], total: int) -> None:
        began, done = time.monotonic(), 0
        self._channel.post(messages.PiecesRequest(self.epoch, missing))
        while (came := await self._came.get()) is not None and not isinstance(came, messages.PiecesEnd):
            if isinstance(came, messages.PiecesFailed):
                raise BadInput(f"the root cannot read what is missing: {came.reason}")
            await asyncio.to_thread(use.keep, came.piece)
            done += len(came.piece.data)
            self._tell(done, total, began)
        if came is None:
            raise Error("the epoch was given up")
        seconds = max(time.monotonic() - began, 1e-3)
        self._channel.post(messages.TransferProgress(self.epoch, done, total))
        self._log.line(f"epoch {self.epoch}: received {format_bytes(done)} in {seconds:.1f} s ({done / seconds / 1e6:.0f} MB/s)")

    def _tell(self, done: int, total: int, began: float) -> None:
        now = time.monotonic()
        if now - self._shown < SECONDS_BETWEEN_PROGRESS:
            return
        self._shown = now
        speed = done / max(now - began, 1e-3)
        self._channel.post(messages.TransferProgress(self.epoch, done, total))
        self._log.show_status(
            f"epoch {self.epoch}: {format_bytes(done)} of {format_bytes(total)} received, {speed / 1e6:.0f} MB/s"
        )
