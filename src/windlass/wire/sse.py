"""Server-sent events, as the API uses them: lines of `data:`, an empty line, and `[DONE]` at the end.

Of the format (WHATWG HTML, section 9.2) all that may arrive is understood: every kind of line ending, comments, several data lines.
"""

from __future__ import annotations

import re

from windlass.errors import Error

DONE = b"[DONE]"
DONE_EVENT = b"data: [DONE]\n\n"
MAX_EVENT_BYTES = 64 * 2**20
"""An event that grows beyond this is no answer of a model."""

_LINE = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


class BrokenStream(Error):
    """What arrives is not a stream of events."""


def event(data: bytes) -> bytes:
    """Of JSON, which has no line breaks."""
    return b"data: " + data + b"\n\n"


class Parser:
    """Bytes in whatever pieces -> the data of whole events."""

    def __init__(self) -> None:
        self._waiting = b""
        """Less than a line."""
        self._data: list[bytes] = []
        self._size = 0
        self._begun = False

    def feed(self, piece: bytes) -> list[bytes]:
        self._waiting += piece
        if not self._begun:
            if len(self._waiting) < len(_BOM) and _BOM.startswith(self._waiting):
                return []
            self._waiting, self._begun = self._waiting.removeprefix(_BOM), True
        found = [data for line in self._lines() if (data := self._line(line)) is not None]
        if len(self._waiting) + self._size > MAX_EVENT_BYTES:
            raise BrokenStream(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return found

    def _lines(self) -> list[bytes]:
        """A carriage return at the very end may be half of a line ending, so it waits."""
        text, held = self._waiting, b""
        if text.endswith(b"\r"):
            text, held = text[:-1], b"\r"
        *lines, rest = _LINE.split(text) if b"\r" in text else text.split(b"\n")
        self._waiting = rest + held
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
