"""Reads request bodies within limits: size and time of each, and total bytes of all that are being read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

from starlette.types import Receive, Scope

from windlass.tasks.serve.http import errors
from windlass.tasks.serve.http.asgi import ClientDisconnected, request_header

UNCOUNTED_BYTES = 64 * 1024
"""The first bytes of every body do not count towards the total, so slow senders of large bodies cannot block ordinary requests."""
RETRY_SECONDS = 1
LARGE_BYTES = 64 * 1024
"""Parsed in a thread: the schema of a smaller one is looked at within some 20 ms."""
Parsed = TypeVar("Parsed")


class BodyReader:
    def __init__(self, max_each: int, max_total: int, seconds: float) -> None:
        self._max_each, self._max_total, self._seconds = max_each, max_total, seconds
        self.buffered_bytes = 0
        """Bytes of incomplete bodies, beyond `UNCOUNTED_BYTES` of each."""

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """Rejects a too large Content-Length before reading, and a body that exceeds the limit while reading."""
        length = request_header(scope, b"content-length")
        if length is not None and length.isdecimal() and int(length) > self._max_each:
            raise errors.too_large(self._max_each)
        try:
            async with asyncio.timeout(self._seconds):
                return await self._read_all(receive)
        except TimeoutError:
            raise errors.body_timeout() from None

    async def _read_all(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        size = counted = 0
        more = True
        try:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnected
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                more = message.get("more_body", False)
                before, counted = counted, max(size - UNCOUNTED_BYTES, 0)
                self.buffered_bytes += counted - before
                self._check(size)
        finally:
            self.buffered_bytes -= counted
        return b"".join(parts)

    async def parsed(self, raw: bytes, parse: Callable[[bytes], Parsed]) -> Parsed:
        """What a body says. A large one is parsed in a thread: it may take a second, and others are answered meanwhile."""
        if len(raw) < LARGE_BYTES:
            return parse(raw)
        with self.held(len(raw)):
            return await asyncio.to_thread(parse, raw)

    @contextmanager
    def held(self, size: int) -> Generator[None]:
        """A body that was read and waits for a thread to parse it: it counts until then."""
        self.buffered_bytes += size
        try:
            self._check(size)
            yield
        finally:
            self.buffered_bytes -= size

    def _check(self, size: int) -> None:
        if size > self._max_each:
            raise errors.too_large(self._max_each)
        if self.buffered_bytes > self._max_total:
            raise errors.too_many_bytes().with_retry_after(RETRY_SECONDS)
