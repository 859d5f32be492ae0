"""The root's own machine as one more worker: a Session at the other end of two queues in memory. No port, no secret."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from windlass.runtime.fleet.protocol.channel import ChannelLost
from windlass.runtime.fleet.protocol.messages import FromRoot, FromWorker
from windlass.runtime.fleet.worker.config import WorkerConfig, WorkerLog
from windlass.runtime.fleet.worker.session import Session

Sent = TypeVar("Sent")
Received = TypeVar("Received")


class MemoryChannel(Generic[Sent, Received]):
    """One end. Never silent: both ends are in this process."""

    silent_seconds = 0.0

    def __init__(self, inbox: asyncio.Queue[Received | None], outbox: asyncio.Queue[Sent | None]) -> None:
        self._inbox, self._outbox = inbox, outbox
        self._is_closed = False

    def post(self, message: Sent) -> None:
        if not self._is_closed:
            self._outbox.put_nowait(message)

    async def send(self, message: Sent) -> None:
        self.post(message)

    async def receive(self) -> Received:
        found = None if self._is_closed else await self._inbox.get()
        if found is None:
            self._is_closed = True
            raise ChannelLost("the other side closed the connection")
        return found

    def mask_key(self, key: bytes, name: str) -> bytes:
        """Nobody else can listen."""
        return key

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._inbox.put_nowait(None)  # wakes this end's receiver
            self._outbox.put_nowait(None)


class NullLog:
    """Discards all lines."""

    def line(self, text: str) -> None:
        pass

    def show_status(self, text: str) -> None:
        pass


class LoopbackMachine:
    """Starts when it is made, on the running event loop. Ranks are started from its thread and end with it."""

    def __init__(self, device: str = "cpu", log: WorkerLog | None = None) -> None:
        to_session: asyncio.Queue[FromRoot | None] = asyncio.Queue()
        to_root: asyncio.Queue[FromWorker | None] = asyncio.Queue()
        self.channel: MemoryChannel[FromRoot, FromWorker] = MemoryChannel(to_root, to_session)
        there: MemoryChannel[FromWorker, FromRoot] = MemoryChannel(to_session, to_root)
        session = Session(there, WorkerConfig(device=device), log or NullLog())
        self._running = asyncio.get_running_loop().create_task(session.run())

    async def close(self) -> None:
        """Returns when no rank is left. May be called twice."""
        self.channel.close()
        await asyncio.wait([self._running])
