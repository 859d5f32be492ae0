"""The rendezvous store of one epoch, kept by the root: keys that ranks put for each other. On an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from windlass.runtime.engine.ranks.messages import KeyFound, KeyMissing, PutKey, TakeKey
from windlass.runtime.fleet.protocol.messages import EpochKeyFound, EpochKeyMissing, PutEpochKey, TakeEpochKey

MAX_BYTES = 2**26
MAX_SECONDS = 24 * 3600.0


class StoreClosed(Exception):
    """A key that was not put in time, or never will be."""


class EpochStore:
    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[str, list[asyncio.Future[bytes]]] = {}
        self._num_bytes = 0
        self._closed = ""
        self._tasks: set[asyncio.Task[None]] = set()

    def put(self, key: str, value: bytes) -> None:
        """Once per key; it stays."""
        self._num_bytes += len(key) + len(value)
        if self._num_bytes > MAX_BYTES:
            self.close(f"ranks put more than {MAX_BYTES:,} bytes in the rendezvous store; a few thousand are normal")
            return
        self._values[key] = value
        for waiting in self._waiting.pop(key, []):
            if not waiting.done():
                waiting.set_result(value)

    async def take(self, key: str, timeout_seconds: float) -> bytes:
        """Waits until it is put. Raises StoreClosed."""
        if key in self._values:
            return self._values[key]
        if self._closed:
            raise StoreClosed(self._closed)
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append(waiting)
        try:
            async with asyncio.timeout(min(max(timeout_seconds, 0.0), MAX_SECONDS)):
                return await waiting
        except TimeoutError:
            raise StoreClosed(f"no rank put {key!r} within {timeout_seconds:g} s") from None

    def close(self, reason: str = "the epoch has ended") -> None:
        """Whoever waits gets the error."""
        self._closed = self._closed or reason
        for waiting in [each for found in self._waiting.values() for each in found]:
            if not waiting.done():
                waiting.set_exception(StoreClosed(self._closed))
        self._waiting.clear()

    # --- for messages of workers, and of rank 0

    def handle(self, message: PutEpochKey | TakeEpochKey, answer: Callable[[EpochKeyFound | EpochKeyMissing], None]) -> None:
        if isinstance(message, PutEpochKey):
            self.put(message.key, message.value)
        else:
            self._answer(
                message.key,
                message.timeout_seconds,
                lambda value: answer(EpochKeyFound(message.id, value)),
                lambda reason: answer(EpochKeyMissing(message.id, reason)),
            )

    def handle_rank(self, message: PutKey | TakeKey, answer: Callable[[KeyFound | KeyMissing], None]) -> None:
        if isinstance(message, PutKey):
            self.put(message.key, message.value)
        else:
            self._answer(
                message.key,
                message.timeout_seconds,
                lambda value: answer(KeyFound(message.id, value)),
                lambda reason: answer(KeyMissing(message.id, reason)),
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
