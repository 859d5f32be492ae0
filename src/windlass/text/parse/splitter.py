"""A text in which calls stand, as it arrives: what is certain comes out, as content or as calls; what may still become either waits."""

from __future__ import annotations

from abc import ABC, abstractmethod

from windlass.core.request import ToolCall
from windlass.text.parse.stop_filter import SPACE, unfinished

Split = tuple[str, tuple[ToolCall, ...]]


class Splitting(ABC):
    def __init__(self, mark: str) -> None:
        """`mark`: what calls begin with."""
        self._mark = mark
        self._waiting = ""
        self._inside = self._after_call = False

    def push(self, text: str) -> Split:
        """(content, calls) as far as it is certain."""
        self._waiting += text
        return self._split(final=False)

    def finish(self) -> Split:
        content, calls = self._split(final=True)
        rest, self._waiting = self._waiting, ""
        return content + rest, calls

    def _split(self, final: bool) -> Split:
        content: list[str] = []
        calls: list[ToolCall] = []
        while True:
            if not self._inside:
                content.append(self._content())
            if not self._inside:
                return "".join(content), tuple(calls)
            found = self._found(final)
            if found is None:
                return "".join(content), tuple(calls)
            if isinstance(found, str):
                content.append(found)
            else:
                calls += found

    def _content(self) -> str:
        """What stands before a call. Waits: the space there may be before one, and what may become a mark."""
        text = self._waiting.lstrip(SPACE) if self._after_call else self._waiting
        begin = text.find(self._mark)
        self._inside = begin >= 0
        self._begin()
        end = begin if self._inside else len(text) - unfinished(text, (self._mark,))
        certain = text[:end].rstrip(SPACE)
        self._waiting = text[len(certain) :]
        self._after_call = self._after_call and not text
        return certain

    @abstractmethod
    def _begin(self) -> None:
        """Nothing of the next call has been looked at."""

    @abstractmethod
    def _found(self, final: bool) -> list[ToolCall] | str | None:
        """Calls, or text that is none, or None: it is not known yet."""

    def _called(self, calls: list[ToolCall], end: int) -> list[ToolCall]:
        """They end there."""
        self._inside, self._after_call, self._waiting = False, True, self._waiting[end:]
        return calls

    def _as_text(self, end: int) -> str:
        """Up to there it was no call."""
        text, self._waiting = self._waiting[:end], self._waiting[end:]
        self._inside = self._after_call = False
        return text
