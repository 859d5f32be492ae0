"""Rank processes of this machine, as their supervisor sees them: start, messages, heartbeat timeout, end. On an event loop; no torch."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

from windlass.core.launch import RankJob
from windlass.core.ranks.frames import FrameReader
from windlass.runtime.engine.protocol import EngineFailed
from windlass.runtime.engine.ranks.messages import (
    HEARTBEAT_TIMEOUT_SECONDS,
    FromRank,
    HeartbeatRequest,
    RankHeartbeat,
    ToRank,
    decode_from_rank,
    framed,
)
from windlass.runtime.engine.ranks.process import start_rank
from windlass.runtime.fleet.protocol.handshake import DECODE_ERRORS
from windlass.runtime.machine.exit_status import describe_exit, last_line

SECONDS_TO_BEGIN = 60.0
"""Before its first heartbeat a rank imports torch, which blocks all its threads and is slow from a cold disk."""
HEARTBEAT_REPLY_SECONDS = 1.0
STUCK = "Stuck"

OnMessage = Callable[[FromRank], None]


class RankConnection(asyncio.Protocol):
    """The supervisor's end of the socket to a rank."""

    def __init__(self, on_message: OnMessage, lost: Callable[[], None]) -> None:
        """Both are called on the event loop; no message comes after `lost`."""
        self._on_message, self._lost = on_message, lost
        self._frames = FrameReader()
        self._transport: Any = None

    def send(self, message: ToRank | RankJob) -> None:
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
                self._on_message(decode_from_rank(body))
        except DECODE_ERRORS:  # not our protocol
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost()


async def connect_rank(connection: socket.socket, on_message: OnMessage, lost: Callable[[], None]) -> RankConnection:
    """To a rank that is already running."""
    _, opened = await asyncio.get_running_loop().create_unix_connection(lambda: RankConnection(on_message, lost), sock=connection)
    return opened


class RankProcess:
    """One process. `ended` is called once, when it has exited, unless `close` was called before."""

    def __init__(self, job: RankJob, threads: int, on_message: OnMessage, ended: Callable[[EngineFailed], None]) -> None:
        self.rank, self.heartbeat = job.rank, RankHeartbeat()
        self._job, self._threads, self._on_message, self._ended = job, threads, on_message, ended
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._failure: EngineFailed | None = None
        self._last_heartbeat = 0.0
        self._began = time.monotonic()
        self._reply: asyncio.Future[RankHeartbeat] | None = None
        self._reaping: asyncio.Task[None] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: RankConnection | None = None
        self._is_closed = False

    async def start(self) -> None:
        self._process, connection = start_rank(self._threads, self._output)
        self._connection = await connect_rank(connection, self._handle, self._lost)
        self._connection.send(self._job)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def send(self, message: ToRank) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def check(self, now: float) -> None:
        """To be called a few times a second: kills a process without heartbeats."""
        since, limit = (
            (self._last_heartbeat, HEARTBEAT_TIMEOUT_SECONDS) if self._last_heartbeat else (self._began, SECONDS_TO_BEGIN)
        )
        if now - since > limit and self._failure is None:
            self._failure = EngineFailed(
                STUCK, f"sent no heartbeat for {now - since:.1f} s: the process is stopped or the machine is swapping"
            )
            if self._process is not None:
                self._process.kill()

    async def fresh_heartbeat(self) -> RankHeartbeat:
        """Requested now; the last one if there is no reply."""
        self._reply = asyncio.get_running_loop().create_future()
        self.send(HeartbeatRequest())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT_REPLY_SECONDS):
                await self._reply
        self._reply = None
        return self.heartbeat

    async def close(self) -> None:
        """Kills the process and waits for it: it has no state to save."""
        self._is_closed = True
        if self._connection is not None:
            self._connection.close()
        try:
            if self._process is not None:
                self._process.kill()
                # Shielded: whoever is cancelled here may call `close` again.
                await (asyncio.shield(self._reaping) if self._reaping else asyncio.to_thread(self._process.wait))
        finally:
            self._output.close()

    def _handle(self, message: FromRank) -> None:
        match message:
            case RankHeartbeat():
                self.heartbeat, self._last_heartbeat = message, time.monotonic()
                if message.is_reply and self._reply is not None and not self._reply.done():
                    self._reply.set_result(message)
            case EngineFailed():
                self._failure = self._failure or message
            case _:
                self._on_message(message)

    def _lost(self) -> None:
        """The process has exited or is about to: it ends with its socket."""
        if not self._is_closed:
            self._reaping = asyncio.get_running_loop().create_task(self._reap())

    async def _reap(self) -> None:
        assert self._process is not None
        try:
            await asyncio.to_thread(_end, self._process)
            if not self._is_closed:
                self._ended(self._failure or EngineFailed("", self._why()))
        finally:
            self._output.close()  # `close` need not follow

    def _why(self) -> str:
        last = last_line(self._output.fileno())
        return describe_exit(self._process.returncode if self._process is not None else 0) + (f": {last}" if last else "")


def _end(process: Any) -> None:
    try:
        process.wait(1.0)
    except Exception:  # noqa: BLE001 - subprocess.TimeoutExpired: it closed its socket and runs on
        process.kill()
        process.wait()
