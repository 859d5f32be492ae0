"""Requests over plain sockets: a pool of kept connections, no more work per read than `response.py` does."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from windlass.tasks.bench.served.client.response import BadResponse, ResponseReader
from windlass.tasks.bench.served.record import RequestRecord

CONNECT_SECONDS = 10.0
SILENT_SECONDS = 300.0
"""Without a byte for so long, a request has failed."""
LOST = "connection lost"
Clock = Callable[[], float]


class _Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._reader: ResponseReader | None = None
        self._done: asyncio.Future[str] | None = None
        self.last_data = 0.0
        self.is_open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def start(self, request: bytes, reader: ResponseReader) -> asyncio.Future[str]:
        """Done when the response is: with what went wrong, empty for nothing."""
        assert self._transport is not None
        self._reader, self._done = reader, asyncio.get_running_loop().create_future()
        self.last_data = self._clock()
        self._transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        now = self.last_data = self._clock()
        reader = self._reader
        if reader is None:  # nothing was asked
            self.close()
            return
        try:
            reader.feed(data, now)
        except BadResponse as wrong:
            self.is_open = False
            self._finish(str(wrong))
            return
        if reader.is_complete:
            self._finish("")

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._finish(LOST)

    def close(self) -> None:
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def _finish(self, why: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(why)
        self._reader = None


class Connections:
    """To one server."""

    def __init__(self, url: str, api_key: str | None = None, clock: Clock = time.monotonic) -> None:
        """`url`: up to the API's version, `http://127.0.0.1:8000/v1`."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._tls else 80)
        self._base = parts.path.rstrip("/")
        self._clock = clock
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f"Host: {parts.netloc}\r\n{key}Content-Type: application/json\r\nAccept: text/event-stream\r\n"
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def post(self, path: str, body: bytes, due: float | None = None) -> RequestRecord:
        """Never raises for what a server does: that is in the record. `due`: when it should have been sent; without it, now."""
        sent = self._clock() if due is None else due
        request = f"POST {self._base}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(body)}\r\n\r\n".encode() + body
        while True:
            connection, is_kept, why = await self._connection()
            if connection is None:
                return RequestRecord(sent=sent, ended=self._clock(), error=why)
            reader = ResponseReader()
            try:
                why = await self._wait(connection, connection.start(request, reader))
            except asyncio.CancelledError:
                connection.close()
                raise
            if why == LOST and is_kept and not reader.has_data:
                continue  # the server closed a kept connection as the request was on its way: HTTP/1.1 has it sent again
            self._put_back(connection, reader)
            return reader.record(sent, self._clock(), why)

    def close(self) -> None:
        for connection in self._open:
            connection.close()
        self._open.clear()
        self._idle.clear()

    async def _connection(self) -> tuple[_Connection | None, bool, str]:
        while self._idle:
            kept = self._idle.pop()
            if kept.is_open:
                return kept, True, ""
            self._open.discard(kept)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, made = await loop.create_connection(lambda: _Connection(self._clock), self._host, self._port, ssl=self._tls)
        except (OSError, TimeoutError) as error:
            return None, False, f"cannot connect: {getattr(error, 'strerror', None) or type(error).__name__}"
        self._open.add(made)
        return made, False, ""

    async def _wait(self, connection: _Connection, done: asyncio.Future[str]) -> str:
        while True:
            await asyncio.wait((done,), timeout=SILENT_SECONDS)
            if done.done():
                return done.result()
            if self._clock() - connection.last_data >= SILENT_SECONDS:
                return f"no data for {SILENT_SECONDS:g} s"

    def _put_back(self, connection: _Connection, reader: ResponseReader) -> None:
        if connection.is_open and reader.is_complete and reader.keeps_alive:
            self._idle.append(connection)
        else:
            connection.close()
            self._open.discard(connection)
