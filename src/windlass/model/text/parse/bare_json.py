"""Tool calls in Llama 3's format: the output is {"name": "f", "parameters": {"k": 1}}, optionally after <|python_tag|>; several calls
are separated by semicolons. Output that starts with anything else can have calls only after the tag.

Other JSON is returned as text.
"""

from __future__ import annotations

from windlass.core.request import ToolCall
from windlass.model.text.parse.json_end import JsonEnd
from windlass.model.text.parse.partial_calls import partial_json_call
from windlass.model.text.parse.splitter import Split, ToolCallSplitter, without_partial_mark
from windlass.model.text.parse.stop_filter import SPACE, partial_match_length
from windlass.model.text.parse.styles import PYTHON_TAG
from windlass.model.text.parse.tool_calls import call_from_json, parse_json


class BareJsonSplitter(ToolCallSplitter):
    def __init__(self) -> None:
        super().__init__(PYTHON_TAG)
        self._inside = True  # the output may start with a call
        self._end = JsonEnd()

    def finish(self) -> Split:
        content, calls = self._split(final=True)
        rest = self._buffer.strip(SPACE + ";") and self._buffer if self._after_call else self._buffer
        self._buffer = ""
        text = without_partial_mark(rest.replace(PYTHON_TAG, ""), PYTHON_TAG)
        return content + ("" if self.is_required else text), calls

    def _begin(self) -> None:
        self._end = JsonEnd()

    def _content(self) -> str:
        """Up to the next tag."""
        begin = self._buffer.find(PYTHON_TAG)
        self._inside = begin >= 0
        self._begin()
        end = begin if begin >= 0 else len(self._buffer) - partial_match_length(self._buffer, (PYTHON_TAG,))
        certain, self._buffer = self._buffer[:end], self._buffer[end:]
        return certain

    def _next_calls(self, final: bool) -> list[ToolCall] | str | None:
        start = self._start()
        if start is None:
            return None
        if start < 0:
            return self._as_text(self._tag_end(), PYTHON_TAG)
        end = self._end.find(self._buffer[start:])
        if end is None:
            return self._incomplete(final, start)
        found = partial_json_call(self._buffer[start : start + end]) or call_from_json(
            parse_json(self._buffer[start : start + end])
        )
        if found is None:
            tag, text = self._buffer[:start].find(PYTHON_TAG), self._as_text(start + end)
            return (text if tag < 0 else text[tag + len(PYTHON_TAG) :]).replace(PYTHON_TAG, "")
        call = self._progress.finished(*found)
        self._take_calls([call], start + end)
        self._inside = True  # another may follow
        self._begin()
        return [call]

    def _incomplete(self, final: bool, start: int) -> list[ToolCall] | None:
        if not final and not self._progress.is_due(len(self._buffer)):
            return None
        partial = partial_json_call(self._buffer[start:])
        if final and partial is not None:
            return self._take_calls([self._progress.finished(*partial)], len(self._buffer))
        self._progress.update(partial)
        return None

    def _start(self) -> int | None:
        """Position of the JSON object; -1: there is none; None: not known yet."""
        skipped = SPACE + (";" if self._after_call else "")
        text = self._buffer.lstrip(skipped)
        if text.startswith(PYTHON_TAG):
            text = text[len(PYTHON_TAG) :].lstrip(SPACE)
        elif PYTHON_TAG.startswith(text):
            return None
        if not text:
            return None
        return len(self._buffer) - len(text) if text[0] == "{" else -1

    def _tag_end(self) -> int:
        """The end of a tag that no call follows; 0 without a tag."""
        begin = self._buffer.find(PYTHON_TAG)
        skipped = len(self._buffer) - len(self._buffer.lstrip(SPACE + ";"))
        return begin + len(PYTHON_TAG) if 0 <= begin <= skipped else 0
