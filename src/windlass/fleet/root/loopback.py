"""The root's own machine as one more worker, in the same words: a Session at the other end of two queues in memory. No port, no secret."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from windlass.fleet.protocol.channel import ChannelLost
from windlass.fleet.protocol.messages import FromRoot, FromWorker
from windlass.fleet.worker.config import WorkerConfig, WorkerLog
from windlass.fleet.worker.session import Session

Said = TypeVar("Said")
Heard = TypeVar("Heard")


class MemoryChannel(Generic[Said, Heard]):
    """One end. Nobody is silent in one's own process."""

    silent_seconds = 0.0

    def __init__(self, inbox: asyncio.Queue[Heard | None], outbox: asyncio.Queue[Said | None]) -> None:
        self._inbox, self._outbox = inbox, outbox
        self._is_closed = False

    def post(self, message: Said) -> None:
        if not self._is_closed:
            self._outbox.put_nowait(message)

    async def send(self, message: Said) -> None:
        self.post(message)

    async def receive(self) -> Heard:
        found = None if self._is_closed else await self._inbox.get()
        if found is None:
            self._is_closed = True
            raise ChannelLost("the other side closed the connection")
        return found

    def mask_key(self, key: bytes, name: str) -> bytes:
        """Nobody can listen."""
        return key

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._inbox.put_nowait(None)  # whoever listens here
            self._outbox.put_nowait(None)


class NullLog:
    """A log that nobody reads."""

    def line(self, text: str) -> None:
        pass

    def show_status(self, text: str) -> None:
        pass


class LoopbackMachine:
    """Begins when it is made, on the event loop that runs then, in whose thread ranks are started and with which they end."""

    def __init__(self, device: str = "cpu", log: WorkerLog | None = None) -> None:
        to_here: asyncio.Queue[FromRoot | None] = asyncio.Queue()
        to_root: asyncio.Queue[FromWorker | None] = asyncio.Queue()
        self.channel: MemoryChannel[FromRoot, FromWorker] = MemoryChannel(to_root, to_here)
        here: MemoryChannel[FromWorker, FromRoot] = MemoryChannel(to_here, to_root)
        session = Session(here, WorkerConfig(device=device), log or NullLog())
        self._running = asyncio.get_running_loop().create_task(session.run())

    async def close(self) -> None:
        """No rank is left when this returns. May be called twice."""
        self.channel.close()
        await asyncio.wait([self._running])
