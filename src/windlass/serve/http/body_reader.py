"""Bodies of requests, read within bounds: each in its size and its time, and all that are being read together."""

from __future__ import annotations

import asyncio

from starlette.types import Receive, Scope

from windlass.serve.http import errors as failures
from windlass.serve.http.asgi import Gone, header

FREE_BYTES = 64 * 1024
"""Of every body, that count for nothing: whoever sends large bodies slowly does not keep ordinary requests out."""
RETRY_SECONDS = 1


class Bodies:
    def __init__(self, most_each: int, most_together: int, seconds: float) -> None:
        self._most_each, self._most_together, self._seconds = most_each, most_together, seconds
        self.held = 0
        """Bytes of those that are not whole yet, beyond what is free."""

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """Refuses what says that it is too large before reading it, and what turns out to be while reading."""
        length = header(scope, b"content-length")
        if length is not None and length.isdecimal() and int(length) > self._most_each:
            raise failures.too_large(self._most_each)
        try:
            async with asyncio.timeout(self._seconds):
                return await self._whole(receive)
        except TimeoutError:
            raise failures.slow_body() from None

    async def _whole(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        size = counted = 0
        more = True
        try:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                more = message.get("more_body", False)
                before, counted = counted, max(size - FREE_BYTES, 0)
                self.held += counted - before
                self._check(size)
        finally:
            self.held -= counted
        return b"".join(parts)

    def _check(self, size: int) -> None:
        if size > self._most_each:
            raise failures.too_large(self._most_each)
        if self.held > self._most_together:
            raise failures.crowded().after(RETRY_SECONDS)
