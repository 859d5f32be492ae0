"""The rank processes of this machine, from outside: started, listened to, found to be stuck, ended. On an event loop; no torch."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

from windlass.core.frames import FrameReader
from windlass.core.launch import RankJob
from windlass.engine.protocol import EngineFailed
from windlass.engine.ranks.messages import (
    HEARTBEAT_TIMEOUT_SECONDS,
    FromRank,
    HeartbeatRequest,
    RankHeartbeat,
    ToRank,
    decode_from_rank,
    framed,
)
from windlass.engine.ranks.process import start_rank
from windlass.fleet.protocol.handshake import DECODE_ERRORS
from windlass.machine.exit_status import describe_exit, last_line

SECONDS_TO_BEGIN = 60.0
"""Before its first heartbeat a rank imports torch, which holds up all its threads: on a cold disk it takes long."""
HEARTBEAT_REPLY_SECONDS = 1.0
STUCK = "Stuck"

Heard = Callable[[FromRank], None]


class RankConnection(asyncio.Protocol):
    """The supervisor's end of the socket to a rank."""

    def __init__(self, heard: Heard, lost: Callable[[], None]) -> None:
        """Both are called on the event loop; nothing is heard after `lost`."""
        self._heard, self._lost = heard, lost
        self._frames = FrameReader()
        self._transport: Any = None

    def tell(self, message: ToRank | RankJob) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed(message))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.push(data):
                self._heard(decode_from_rank(body))
        except DECODE_ERRORS:  # not a word of ours
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()


async def connect_rank(connection: socket.socket, heard: Heard, lost: Callable[[], None]) -> RankConnection:
    """Of a rank that somebody else has started: the first, which is the engine's process."""
    _, opened = await asyncio.get_running_loop().create_unix_connection(lambda: RankConnection(heard, lost), sock=connection)
    return opened


class RankProcess:
    """One life of one rank. `ended` comes once, when the process is gone, unless it was closed before."""

    def __init__(self, job: RankJob, threads: int, heard: Heard, ended: Callable[[EngineFailed], None]) -> None:
        self.rank, self.heartbeat = job.rank, RankHeartbeat()
        self._job, self._threads, self._heard, self._ended = job, threads, heard, ended
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._failed: EngineFailed | None = None
        self._last_heartbeat = 0.0
        self._began = time.monotonic()
        self._asked: asyncio.Future[RankHeartbeat] | None = None
        self._reaping: asyncio.Task[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: RankConnection | None = None
        self._is_closed = False

    async def start(self) -> None:
        self._process, connection = start_rank(self._threads, self._output)
        self._connection = await connect_rank(connection, self._hear, self._lost)
        self._connection.tell(self._job)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def tell(self, message: ToRank) -> None:
        if self._connection is not None:
            self._connection.tell(message)

    def look(self, now: float) -> None:
        """To be called a few times a second: a process that gives no sign of life is ended."""
        since, limit = (
            (self._last_heartbeat, HEARTBEAT_TIMEOUT_SECONDS) if self._last_heartbeat else (self._began, SECONDS_TO_BEGIN)
        )
        if now - since > limit and self._failed is None:
            self._failed = EngineFailed(STUCK, f"gave no sign of life for {now - since:.1f} s: stopped, or out of memory or time")
            if self._process is not None:
                self._process.kill()

    async def fresh_heartbeat(self) -> RankHeartbeat:
        """Asked for now; the last one where there is no answer."""
        self._asked = asyncio.get_running_loop().create_future()
        self.tell(HeartbeatRequest())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT_REPLY_SECONDS):
                await self._asked
        self._asked = None
        return self.heartbeat

    async def close(self) -> None:
        """Gone when this returns, however far it had come. There is nothing for it to put in order first."""
        self._is_closed = True
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            await (self._reaping or asyncio.to_thread(self._process.wait))
        self._output.close()

    def _hear(self, said: FromRank) -> None:
        match said:
            case RankHeartbeat():
                self.heartbeat, self._last_heartbeat = said, time.monotonic()
                if said.is_reply and self._asked is not None and not self._asked.done():
                    self._asked.set_result(said)
            case EngineFailed():
                self._failed = self._failed or said
            case _:
                self._heard(said)

    def _lost(self) -> None:
        """The process is gone or about to be: it ends with its line."""
        if not self._is_closed:
            self._reaping = asyncio.get_running_loop().create_task(self._reap())

    async def _reap(self) -> None:
        assert self._process is not None
        await asyncio.to_thread(_end, self._process)
        if not self._is_closed:
            self._ended(self._failed or EngineFailed("", self._why()))

    def _why(self) -> str:
        last = last_line(self._output.fileno())
        return describe_exit(self._process.returncode if self._process is not None else 0) + (f": {last}" if last else "")


def _end(process: Any) -> None:
    try:
        process.wait(1.0)
    except Exception:  # noqa: BLE001 - subprocess.TimeoutExpired: it closed its line and goes on
        process.kill()
        process.wait()
