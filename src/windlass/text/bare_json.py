"""Tool calls as Llama 3 writes them: the answer itself is {"name": "f", "parameters": {"k": 1}}, with or without a mark before it;
several are set apart by semicolons. An answer that begins with anything else has calls only behind the mark.

What is no call comes out as the text it is.
"""

from __future__ import annotations

from windlass.core.request import ToolCall
from windlass.text.held import SPACE, unfinished
from windlass.text.json_end import JsonEnd
from windlass.text.styles import PYTHON_TAG
from windlass.text.tools import call_from, decoded


class BareJsonSplitter:
    def __init__(self) -> None:
        self._waiting = ""
        self._may_call = True
        """Whether a call may stand where the waiting text begins."""
        self._after_call = False
        self._end = JsonEnd()

    def push(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        self._waiting += text
        return self._split()

    def finish(self) -> tuple[str, tuple[ToolCall, ...]]:
        content, calls = self._split()
        rest = self._waiting.strip(SPACE + ";") and self._waiting if self._after_call else self._waiting
        self._waiting = ""
        return content + rest, calls

    def _split(self) -> tuple[str, tuple[ToolCall, ...]]:
        content: list[str] = []
        calls: list[ToolCall] = []
        while True:
            if not self._may_call:
                content.append(self._content())
            if not self._may_call:
                return "".join(content), tuple(calls)
            found = self._call()
            if found is None:
                return "".join(content), tuple(calls)
            if isinstance(found, str):
                content.append(found)
            else:
                calls.append(found)

    def _content(self) -> str:
        """Up to the next mark."""
        begin = self._waiting.find(PYTHON_TAG)
        self._may_call, self._end = begin >= 0, JsonEnd()
        end = begin if begin >= 0 else len(self._waiting) - unfinished(self._waiting, (PYTHON_TAG,))
        certain, self._waiting = self._waiting[:end], self._waiting[end:]
        return certain

    def _call(self) -> ToolCall | str | None:
        """A call, or text that is none, or None: it is not known yet."""
        start = self._start()
        if start is None:
            return None
        if start < 0:
            return self._as_text(self._tag_end())
        end = self._end.find(self._waiting[start:])
        if end is None:
            return None
        call = call_from(decoded(self._waiting[start : start + end]))
        if call is None:
            return self._as_text(start + end)
        self._waiting, self._end, self._after_call = self._waiting[start + end :], JsonEnd(), True
        return call

    def _start(self) -> int | None:
        """Of the object; -1: there is none; None: it is not known yet."""
        skipped = SPACE + (";" if self._after_call else "")
        text = self._waiting.lstrip(skipped)
        if text.startswith(PYTHON_TAG):
            text = text[len(PYTHON_TAG) :].lstrip(SPACE)
        elif PYTHON_TAG.startswith(text):
            return None
        if not text:
            return None
        return len(self._waiting) - len(text) if text[0] == "{" else -1

    def _tag_end(self) -> int:
        """Behind the mark, which was none of ours; without one nothing is given out yet."""
        begin = self._waiting.find(PYTHON_TAG)
        skipped = len(self._waiting) - len(self._waiting.lstrip(SPACE + ";"))
        return begin + len(PYTHON_TAG) if 0 <= begin <= skipped else 0

    def _as_text(self, end: int) -> str:
        text, self._waiting, self._may_call, self._after_call = self._waiting[:end], self._waiting[end:], False, False
        return text
