"""Tool calls as Llama 3 writes them: the answer itself is {"name": "f", "parameters": {"k": 1}}, with or without a mark before it;
several are set apart by semicolons. An answer that begins with anything else has calls only behind the mark.

What is no call comes out as the text it is.
"""

from __future__ import annotations

from windlass.core.request import ToolCall
from windlass.text.parse.json_end import JsonEnd
from windlass.text.parse.splitter import Split, Splitting
from windlass.text.parse.stop_filter import SPACE, unfinished
from windlass.text.parse.styles import PYTHON_TAG
from windlass.text.parse.tool_calls import call_from, decoded


class BareJsonSplitter(Splitting):
    def __init__(self) -> None:
        super().__init__(PYTHON_TAG)
        self._inside = True  # a call may stand where the text begins
        self._end = JsonEnd()

    def finish(self) -> Split:
        content, calls = self._split(final=True)
        rest = self._waiting.strip(SPACE + ";") and self._waiting if self._after_call else self._waiting
        self._waiting = ""
        return content + rest, calls

    def _begin(self) -> None:
        self._end = JsonEnd()

    def _content(self) -> str:
        """Up to the next mark."""
        begin = self._waiting.find(PYTHON_TAG)
        self._inside = begin >= 0
        self._begin()
        end = begin if begin >= 0 else len(self._waiting) - unfinished(self._waiting, (PYTHON_TAG,))
        certain, self._waiting = self._waiting[:end], self._waiting[end:]
        return certain

    def _found(self, final: bool) -> list[ToolCall] | str | None:
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
        self._called([call], start + end)
        self._inside = True  # another may follow
        self._begin()
        return [call]

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
