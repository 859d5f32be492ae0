"""Server-sent events as the API uses them: `data:` lines, an empty line, and `[DONE]` at the end.

The parser accepts the whole format (WHATWG HTML, section 9.2): all line endings, comments, several data lines per event.
"""

from __future__ import annotations

import re

from windlass.errors import Error

DONE = b"[DONE]"
DONE_EVENT = b"data: [DONE]\n\n"
MAX_EVENT_BYTES = 64 * 2**20
"""A larger event cannot be a response of a model."""

_LINE = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


class BrokenEventStream(Error):
    """The data is not a valid event stream."""


def event(data: bytes) -> bytes:
    """`data` is JSON without line breaks."""
    return b"data: " + data + b"\n\n"


class EventParser:
    """Bytes in arbitrary pieces -> the data of complete events."""

    def __init__(self) -> None:
        self._buffer = b""
        """An incomplete line."""
        self._data: list[bytes] = []
        self._size = 0
        self._started = False

    def feed(self, piece: bytes) -> list[bytes]:
        self._buffer += piece
        if not self._started:
            if len(self._buffer) < len(_BOM) and _BOM.startswith(self._buffer):
                return []
            self._buffer, self._started = self._buffer.removeprefix(_BOM), True
        found = [data for line in self._lines() if (data := self._line(line)) is not None]
        if len(self._buffer) + self._size > MAX_EVENT_BYTES:
            raise BrokenEventStream(f"an event exceeds {MAX_EVENT_BYTES:,} bytes")
        return found

    def _lines(self) -> list[bytes]:
        """A trailing carriage return may be half of a line ending, so it stays in the buffer."""
        text, held = self._buffer, b""
        if text.endswith(b"\r"):
            text, held = text[:-1], b"\r"
        *lines, rest = _LINE.split(text) if b"\r" in text else text.split(b"\n")
        self._buffer = rest + held
        return lines

    def _line(self, line: bytes) -> bytes | None:
        if not line:
            data, self._data, self._size = self._data, [], 0
            return b"\n".join(data) if data else None
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._size += len(value)
        return None
