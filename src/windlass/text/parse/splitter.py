"""Base of the tool call parsers: splits streamed text into content and calls, holding back what may still become either."""

from __future__ import annotations

from abc import ABC, abstractmethod

from windlass.core.request import ToolCall
from windlass.text.parse.stop_filter import SPACE, partial_match_length

Split = tuple[str, tuple[ToolCall, ...]]


class ToolCallSplitter(ABC):
    def __init__(self, mark: str) -> None:
        """`mark`: the marker before calls."""
        self._mark = mark
        self._buffer = ""
        self._inside = self._after_call = False

    def push(self, text: str) -> Split:
        """(content, calls) as far as certain."""
        self._buffer += text
        return self._split(final=False)

    def finish(self) -> Split:
        content, calls = self._split(final=True)
        rest, self._buffer = self._buffer, ""
        return content + rest, calls

    def _split(self, final: bool) -> Split:
        content: list[str] = []
        calls: list[ToolCall] = []
        while True:
            if not self._inside:
                content.append(self._content())
            if not self._inside:
                return "".join(content), tuple(calls)
            found = self._next_calls(final)
            if found is None:
                return "".join(content), tuple(calls)
            if isinstance(found, str):
                content.append(found)
            else:
                calls += found

    def _content(self) -> str:
        """Text before a call. Held back: trailing whitespace, and a possible beginning of the marker."""
        text = self._buffer.lstrip(SPACE) if self._after_call else self._buffer
        begin = text.find(self._mark)
        self._inside = begin >= 0
        self._begin()
        end = begin if self._inside else len(text) - partial_match_length(text, (self._mark,))
        certain = text[:end].rstrip(SPACE)
        self._buffer = text[len(certain) :]
        self._after_call = self._after_call and not text
        return certain

    @abstractmethod
    def _begin(self) -> None:
        """Resets the state of the call parser."""

    @abstractmethod
    def _next_calls(self, final: bool) -> list[ToolCall] | str | None:
        """Calls, or text that turned out not to be one, or None: incomplete."""

    def _take_calls(self, calls: list[ToolCall], end: int) -> list[ToolCall]:
        """Consumes the buffer up to `end`, after calls."""
        self._inside, self._after_call, self._buffer = False, True, self._buffer[end:]
        return calls

    def _as_text(self, end: int) -> str:
        """Consumes the buffer up to `end` as text."""
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        self._inside = self._after_call = False
        return text
