"""Notes that the ranks of one epoch leave for each other, kept by the root; those of workers come and go on their channels. On an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from windlass.engine.ranks.messages import KeyFound, KeyMissing, PutKey, TakeKey
from windlass.fleet.protocol.messages import EpochKeyFound, EpochKeyMissing, PutEpochKey, TakeEpochKey

MAX_BYTES = 2**26
MAX_SECONDS = 24 * 3600.0


class StoreClosed(Exception):
    """A note that did not come, or never will."""


class EpochStore:
    def __init__(self) -> None:
        self._notes: dict[str, bytes] = {}
        self._waiting: dict[str, list[asyncio.Future[bytes]]] = {}
        self._num_bytes = 0
        self._closed = ""
        self._tasks: set[asyncio.Task[None]] = set()

    def put(self, key: str, value: bytes) -> None:
        """Written once; it stays."""
        self._num_bytes += len(key) + len(value)
        if self._num_bytes > MAX_BYTES:
            self.close(f"notes of more than {MAX_BYTES:,} bytes; ranks say no more than a few thousand")
            return
        self._notes[key] = value
        for waiting in self._waiting.pop(key, []):
            if not waiting.done():
                waiting.set_result(value)

    async def take(self, key: str, timeout_seconds: float) -> bytes:
        """Waits for it. Raises NotesLost."""
        if key in self._notes:
            return self._notes[key]
        if self._closed:
            raise StoreClosed(self._closed)
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append(waiting)
        try:
            async with asyncio.timeout(min(max(timeout_seconds, 0.0), MAX_SECONDS)):
                return await waiting
        except TimeoutError:
            raise StoreClosed(f"no note {key!r} after {timeout_seconds:g} s") from None

    def close(self, reason: str = "the epoch has ended") -> None:
        """Whoever waits is told."""
        self._closed = self._closed or reason
        for waiting in [each for found in self._waiting.values() for each in found]:
            if not waiting.done():
                waiting.set_exception(StoreClosed(self._closed))
        self._waiting.clear()

    # --- in the reason of a worker's channel, and of a rank's line

    def hear(self, said: PutEpochKey | TakeEpochKey, answer: Callable[[EpochKeyFound | EpochKeyMissing], None]) -> None:
        if isinstance(said, PutEpochKey):
            self.put(said.key, said.value)
        else:
            self._answer(
                said.key,
                said.timeout_seconds,
                lambda value: answer(EpochKeyFound(said.id, value)),
                lambda reason: answer(EpochKeyMissing(said.id, reason)),
            )

    def hear_rank(self, said: PutKey | TakeKey, answer: Callable[[KeyFound | KeyMissing], None]) -> None:
        if isinstance(said, PutKey):
            self.put(said.key, said.value)
        else:
            self._answer(
                said.key,
                said.timeout_seconds,
                lambda value: answer(KeyFound(said.id, value)),
                lambda reason: answer(KeyMissing(said.id, reason)),
            )

    def _answer(self, key: str, seconds: float, found: Callable[[bytes], None], lost: Callable[[str], None]) -> None:
        async def answer() -> None:
            try:
                found(await self.take(key, seconds))
            except StoreClosed as error:
                lost(str(error))

        task = asyncio.get_running_loop().create_task(answer())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
