"""Base of the tool call parsers: splits streamed text into content and calls, holding back what may still become either.

A call is announced as soon as its name and the beginning of its arguments are there, and returned in pieces from then on. What is
announced stays a call, even if its arguments turn out to be malformed or are cut off. The marks of what is no call are dropped:
markup is never content.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from windlass.core.request import CallPiece, ToolCall
from windlass.model.text.parse.partial_calls import CallProgress
from windlass.model.text.parse.stop_filter import SPACE, partial_match_length

Split = tuple[str, tuple[ToolCall, ...]]
MAX_TEXT_CHARACTERS = 2


class ToolCallSplitter(ABC):
    def __init__(self, mark: str, id_characters: int | None = None) -> None:
        """`mark`: the marker before calls."""
        self._mark = mark
        self._buffer = ""
        self._inside = self._after_call = False
        self._progress = CallProgress(id_characters)
        self.is_required = False
        """The output is nothing but calls, so the beginning of a mark is never text."""

    def push(self, text: str) -> Split:
        """(content, calls) as far as certain."""
        self._buffer += text
        return self._split(final=False)

    def finish(self) -> Split:
        content, calls = self._split(final=True)
        rest, self._buffer = self._buffer, ""
        return content + without_partial_mark(rest, self._mark, self.is_required), calls

    def take_pieces(self) -> tuple[CallPiece, ...]:
        """The pieces of calls since the last time."""
        return self._progress.take()

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

    def _as_text(self, end: int, mark: str = "") -> str:
        """Consumes the buffer up to `end` as text, without `mark` at its end."""
        text, self._buffer = self._buffer[:end].removesuffix(mark), self._buffer[end:]
        self._inside = self._after_call = False
        return text


def without_partial_mark(text: str, mark: str, is_required: bool = False) -> str:
    """Of output that ended, without the beginning of a mark; one or two characters may be text."""
    held = partial_match_length(text, (mark,)) if mark else 0
    return text[:-held] if held > (0 if is_required else MAX_TEXT_CHARACTERS) else text
