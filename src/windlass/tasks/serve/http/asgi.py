"""Small helpers over ASGI: reading headers, sending responses."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import Message, Scope, Send

from windlass.wire.schema.errors import ApiError

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream"
SECURITY_HEADERS = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
TOO_MANY_BYTES = "too_many_bytes"
"""The error code when a body is rejected half read."""
Header = tuple[bytes, bytes]


class ClientDisconnected(Exception):
    """The client closed the connection before it got a response."""


def request_header(scope: Scope, name: bytes) -> str | None:
    for key, value in scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return None


def response_start(status: int, media_type: bytes, length: int | None = None, headers: Iterable[Header] = ()) -> Message:
    found = [(b"content-type", media_type), *SECURITY_HEADERS, *headers]
    if length is not None:
        found.append((b"content-length", str(length).encode()))
    return {"type": "http.response.start", "status": status, "headers": found}


async def send_response(send: Send, status: int, body: bytes, media_type: bytes = JSON, headers: Iterable[Header] = ()) -> None:
    await send(response_start(status, media_type, len(body), headers))
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, error: ApiError, body: bytes) -> None:
    await send_response(send, error.status, body, headers=_error_headers(error))


def _error_headers(error: ApiError) -> list[Header]:
    """A connection whose request body was not read to the end cannot be reused."""
    found = [] if error.retry_seconds is None else [retry_after(error.retry_seconds)]
    if error.status == 401:
        found.append((b"www-authenticate", b"Bearer"))
    if error.status in (408, 413) or error.code == TOO_MANY_BYTES:
        found.append((b"connection", b"close"))
    return found


def retry_after(seconds: int) -> Header:
    return (b"retry-after", str(seconds).encode())
