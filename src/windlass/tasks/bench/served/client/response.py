"""Bytes of one HTTP/1.1 response to a streamed request -> a RequestRecord. Pure: the caller reads and has the clock.

By hand, because a client of 256 streams must not be what is slow: one read costs a chunk, an event and a small JSON document.
"""

from __future__ import annotations

from typing import Any

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.tasks.bench.served.record import RequestRecord
from windlass.wire.client.errors import read_error
from windlass.wire.sse import DONE, BrokenEventStream, EventParser

MAX_HEAD_BYTES, MAX_ERROR_BYTES = 65_536, 65_536
MAX_SHOWN = 160


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    """Of completions and of chats, as far as it is measured."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class BadResponse(Exception):
    """Not HTTP, or not an answer; the message is the record's error."""


class ResponseReader:
    """`feed` it until `is_complete`; then, or when the connection ended, `record`."""

    __slots__ = (
        "_body", "_buffer", "_done", "_error", "_events", "_finish", "_is_chunked", "_is_stream", "_left", "_times", "_usage",
        "is_complete", "keeps_alive", "retry_after", "status",
    )  # fmt: skip

    def __init__(self) -> None:
        self.status = 0
        self.is_complete = False
        self.keeps_alive = True
        self.retry_after = ""
        self._buffer: bytes = b""
        self._is_chunked = self._is_stream = self._done = False
        self._left: int | None = None
        """Bytes of the chunk, or of the body, still to come; None: until the connection ends, or the next chunk's head."""
        self._events = EventParser()
        self._body: bytes = b""
        self._times: list[float] = []
        self._usage: _Usage | None = None
        self._finish = self._error = ""

    @property
    def has_data(self) -> bool:
        return self.status != 0 or bool(self._buffer)

    def feed(self, data: bytes, now: float) -> None:
        """Raises BadResponse."""
        if not self.status:
            self._buffer += data
            data = self._head()
            if not self.status:
                return
        if self._is_chunked:
            self._chunks(data, now)
        else:
            self._plain(data, now)

    def record(self, sent: float, ended: float, why: str = "") -> RequestRecord:
        """`why`: what ended it before it was complete."""
        usage = self._usage or _Usage()
        details = usage.prompt_tokens_details
        return RequestRecord(
            sent=sent,
            ended=ended,
            times=tuple(self._times),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens or 0,
            cached_tokens=(details.cached_tokens or 0) if details else 0,
            status=self.status,
            finish=self._finish,
            error=self._failure(why),
        )

    def _failure(self, why: str) -> str:
        if self._error:
            return self._error
        if self.status and self.status != 200:
            return shown_error(self.status, self._body)
        if self._done:
            return ""
        return why or ("not an event stream" if not self._is_stream else "" if self._finish else "the stream ended early")

    # --- HTTP

    def _head(self) -> bytes:
        """What follows the head; nothing while it is incomplete."""
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            if len(head) > MAX_HEAD_BYTES:
                raise BadResponse("not an HTTP response")
            return b""
        self._buffer = b""
        first, *lines = head.split(b"\r\n")
        words = first.split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise BadResponse("not an HTTP response")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        self.status = int(words[1])
        if self.status == 100:  # to continue, then the response itself
            self.status, self._buffer = 0, rest
            return self._head()
        self._read_headers(headers, words[0])
        return rest

    def _read_headers(self, headers: dict[bytes, bytes], version: bytes) -> None:
        connection = headers.get(b"connection", b"").lower()
        self.keeps_alive = connection != b"close" and (version != b"HTTP/1.0" or connection == b"keep-alive")
        self.retry_after = headers.get(b"retry-after", b"").decode("latin-1")
        self._is_stream = self.status == 200 and b"event-stream" in headers.get(b"content-type", b"")
        self._is_chunked = b"chunked" in headers.get(b"transfer-encoding", b"").lower()
        length = headers.get(b"content-length", b"")
        if not self._is_chunked:
            self._left = int(length) if length.isdigit() else None
            self.is_complete = self._left == 0

    def _plain(self, data: bytes, now: float) -> None:
        if self._left is None:
            self.keeps_alive = False
        else:
            self._left -= len(data)
            self.is_complete = self._left <= 0
        self._content(data, now)

    def _chunks(self, data: bytes, now: float) -> None:
        data, self._buffer = self._buffer + data, b""
        while data:
            size, found, rest = data.partition(b"\r\n")
            if not found:
                break
            length = _chunk_length(size)
            if length == 0:  # trailers are not expected
                self.is_complete = rest.startswith(b"\r\n")
                break
            if len(rest) < length + 2:
                break
            self._content(rest[:length], now)
            data = rest[length + 2 :]
        self._buffer = data

    # --- content

    def _content(self, data: bytes, now: float) -> None:
        if not self._is_stream:
            self._body = (self._body + data)[:MAX_ERROR_BYTES]
            return
        try:
            for event in self._events.feed(data):
                if event == DONE:
                    self._done = True
                else:
                    self._event(event, now)
        except (BrokenEventStream, *DECODE_ERRORS):
            raise BadResponse("an event that is not JSON") from None

    def _event(self, data: bytes, now: float) -> None:
        event = _decode(data)
        if event.error:
            self._error = shown_error(0, data)
        if event.usage is not None:
            self._usage = event.usage
        for choice in event.choices:
            if choice.finish_reason:
                self._finish = choice.finish_reason
            if _has_token(choice):
                self._times.append(now)


def _has_token(choice: _Choice) -> bool:
    """A completion's event without text is a token too, half a character; but neither is the end, nor a chat's first event, its role."""
    if choice.delta is not None:
        delta = choice.delta
        return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)
    return bool(choice.text) or (choice.text is not None and not choice.finish_reason)


def _chunk_length(size: bytes) -> int:
    try:
        return int(size.partition(b";")[0], 16)
    except ValueError:
        raise BadResponse("not an HTTP response") from None


def shown_error(status: int, body: bytes) -> str:
    """`429 rate_limit_exceeded`: codes, so that errors alike are counted together; else the start of the message."""
    detail = read_error(body)
    words = str(detail.code) if detail.code else " ".join(detail.message.split())[:MAX_SHOWN]
    return f"{status} {words}".strip() if status else words or "the server aborted the stream"
