"""uvicorn's HTTP protocol with limits on what a client may do before its request is accepted.

Headers have a time and a size limit (431). Pipelined requests are limited in number, and a disconnect is reported to every one of them:
uvicorn reports it only to the last, and stops reading from the socket while others wait.
"""

from __future__ import annotations

import asyncio
import socket
from http import HTTPStatus
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from windlass.tasks.serve.http.asgi import JSON
from windlass.tasks.serve.http.errors import invalid_http, too_large_head

MAX_HEAD_BYTES = 64 * 1024
"""Of the request line and all headers."""
MAX_HEADERS = 256
MAX_PIPELINED = 8
"""Requests that a client may send before the first response."""
WRITE_TIMEOUT_SECONDS = 120
"""The connection is closed when a client acknowledges no data for this long."""
ABORT = "windlass.abort"
"""Scope key of a function that closes the connection at once, dropping unsent data."""


def protocol_class(head_seconds: float) -> type[HttpToolsProtocol]:
    """uvicorn instantiates the protocol itself, so its configuration must be in the class."""
    return cast(type[HttpToolsProtocol], type("ConfiguredHttpProtocol", (BoundedHttpProtocol,), {"head_seconds": head_seconds}))


class BoundedHttpProtocol(HttpToolsProtocol):
    head_seconds = 20.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        """Received since the head began; what came with it may be part of the body."""
        self._own_bytes = 0
        """Of the head itself, as far as it is parsed."""
        self._in_head = True
        self._cycles: list[RequestResponseCycle] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _set_write_timeout(transport)
        self._timer = self.loop.call_later(self.head_seconds, self._header_timeout)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("")
        self._limit_rest()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers, which nobody reads, would grow without limit
            self._count(len(name) + len(value) + 4)
            super().on_header(name, value)
            if len(self.headers) > MAX_HEADERS:
                self._count(MAX_HEAD_BYTES)

    def _count(self, num_bytes: int) -> None:
        """Ends the parser, and so the request, when the head is too large."""
        self._own_bytes += num_bytes
        if self._own_bytes > MAX_HEAD_BYTES:
            raise ValueError("the head is too large")

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls it for what its parser refuses. An answer that is under way cannot have another in its midst."""
        if any(not cycle.response_complete for cycle in self._cycles):
            self.transport.abort()
            return
        is_too_large = max(self._own_bytes, self._head_bytes if self._in_head else 0) > MAX_HEAD_BYTES
        refusal = too_large_head(MAX_HEAD_BYTES, MAX_HEADERS) if is_too_large else invalid_http()
        status = f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}"
        head = [status, f"content-type: {JSON.decode()}", f"content-length: {len(refusal.body)}", "connection: close", "", ""]
        self.transport.write("\r\n".join(head).encode() + refusal.body)
        self.transport.close()

    def _limit_rest(self) -> None:
        """The rest of a body whose response is already complete stops the keep-alive timer, so it needs one of its own."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        is_idle = cycle is None or cycle.response_complete
        if is_idle and self._timer is None and self.timeout_keep_alive_task is None:
            self._timer = self.loop.call_later(self.head_seconds, self._header_timeout)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[ABORT] = self.transport.abort
        self._in_head, self._head_bytes, self._own_bytes = True, 0, 0
        if self._timer is None:
            self._timer = self.loop.call_later(self.head_seconds, self._header_timeout)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_head = False
        self._stop_timer()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)
        self.flow.resume_reading()  # otherwise a disconnect would go unnoticed
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _header_timeout(self) -> None:
        self._timer = None
        self.transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _set_write_timeout(transport: asyncio.Transport) -> None:
    option = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux
    found: socket.socket | None = transport.get_extra_info("socket")
    if option is not None and found is not None and found.family in (socket.AF_INET, socket.AF_INET6):
        found.setsockopt(socket.IPPROTO_TCP, option, WRITE_TIMEOUT_SECONDS * 1000)
