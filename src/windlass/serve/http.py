"""ASGI's messages: bodies read within bounds, answers sent in one go."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from starlette.types import Message, Receive, Scope, Send

from windlass.serve import failures
from windlass.wire.errors import Refusal

JSON = b"application/json"
EVENTS = b"text/event-stream"
SAFE = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
Header = tuple[bytes, bytes]


class Gone(Exception):
    """The client went away before it had asked."""


def header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return None


async def read_body(scope: Scope, receive: Receive, limit: int, seconds: float) -> bytes:
    """Refuses what says that it is too large before reading it, and what turns out to be while reading."""
    length = header(scope, b"content-length")
    if length is not None and length.isdecimal() and int(length) > limit:
        raise failures.too_large(limit)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                part = message.get("body", b"")
                size += len(part)
                if size > limit:
                    raise failures.too_large(limit)
                parts.append(part)
                more = message.get("more_body", False)
    except TimeoutError:
        raise failures.slow_body() from None
    return b"".join(parts)


def start(status: int, media_type: bytes, length: int | None = None, headers: Iterable[Header] = ()) -> Message:
    found = [(b"content-type", media_type), *SAFE, *headers]
    if length is not None:
        found.append((b"content-length", str(length).encode()))
    return {"type": "http.response.start", "status": status, "headers": found}


async def send_bytes(send: Send, status: int, body: bytes, media_type: bytes = JSON, headers: Iterable[Header] = ()) -> None:
    await send(start(status, media_type, len(body), headers))
    await send({"type": "http.response.body", "body": body})


async def send_refusal(send: Send, refusal: Refusal, headers: Iterable[Header] = ()) -> None:
    await send_bytes(send, refusal.status, refusal.body, headers=[*_implied(refusal), *headers])


def _implied(refusal: Refusal) -> list[Header]:
    """After a body that was not read, the connection cannot be used again."""
    if refusal.status == 401:
        return [(b"www-authenticate", b"Bearer")]
    return [(b"connection", b"close")] if refusal.status in (408, 413) else []


def retry_after(seconds: int) -> Header:
    return (b"retry-after", str(seconds).encode())
