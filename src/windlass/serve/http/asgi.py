"""ASGI's messages: headers found, answers sent in one go."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import Message, Scope, Send

from windlass.wire.schema.errors import Refusal

JSON = b"application/json"
EVENTS = b"text/event-stream"
SAFE = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
CROWDED = "too_many_bytes"
"""The code of a refusal in the middle of a body."""
Header = tuple[bytes, bytes]


class Gone(Exception):
    """The client went away before it had asked."""


def header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return None


def start(status: int, media_type: bytes, length: int | None = None, headers: Iterable[Header] = ()) -> Message:
    found = [(b"content-type", media_type), *SAFE, *headers]
    if length is not None:
        found.append((b"content-length", str(length).encode()))
    return {"type": "http.response.start", "status": status, "headers": found}


async def send_bytes(send: Send, status: int, body: bytes, media_type: bytes = JSON, headers: Iterable[Header] = ()) -> None:
    await send(start(status, media_type, len(body), headers))
    await send({"type": "http.response.body", "body": body})


async def send_refusal(send: Send, refusal: Refusal) -> None:
    await send_bytes(send, refusal.status, refusal.body, headers=_implied(refusal))


def _implied(refusal: Refusal) -> list[Header]:
    """After a body that was not read, the connection cannot be used again."""
    found = [] if refusal.retry_seconds is None else [retry_after(refusal.retry_seconds)]
    if refusal.status == 401:
        found.append((b"www-authenticate", b"Bearer"))
    if refusal.status in (408, 413) or refusal.code == CROWDED:
        found.append((b"connection", b"close"))
    return found


def retry_after(seconds: int) -> Header:
    return (b"retry-after", str(seconds).encode())
