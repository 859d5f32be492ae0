"""Tool calls in the format of the Mistral family:

[TOOL_CALLS][{"name": "f", "arguments": {"k": 1}}, ...]        to version 7 of its tokenizers
[TOOL_CALLS]f{"k": 1}                                          version 11
[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"k": 1}                  version 13, with or without the id

What is no call is returned as text, without the mark. Whitespace around calls is dropped.
"""

from __future__ import annotations

import re

from windlass.core.request import ToolCall
from windlass.model.text.parse.json_end import JsonEnd
from windlass.model.text.parse.partial_calls import PartialCall, partial_json, partial_json_call
from windlass.model.text.parse.splitter import ToolCallSplitter
from windlass.model.text.parse.stop_filter import SPACE
from windlass.model.text.parse.tool_calls import call_from_json, parse_json

OPEN = "[TOOL_CALLS]"
ID_CHARACTERS = 9
"""Templates of this family require ids of at least, some of exactly, this length."""
_HEAD = re.compile(r"\s*([^\s\[\]{}<>=\"]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*")
_LONGEST_HEAD = 256


class BracketSplitter(ToolCallSplitter):
    def __init__(self) -> None:
        super().__init__(OPEN, ID_CHARACTERS)
        self._end = JsonEnd()

    def _begin(self) -> None:
        self._end = JsonEnd()

    def _next_calls(self, final: bool) -> list[ToolCall] | str | None:
        opened = self._buffer.index(OPEN) + len(OPEN)
        body = self._buffer[opened:]
        stripped = body.lstrip(SPACE)
        is_list = stripped.startswith("[")
        start = len(body) - len(stripped) if is_list else body.find("{")
        if not stripped or start < 0:
            may_become_one = not final and OPEN not in body and len(body) <= _LONGEST_HEAD
            return None if may_become_one else self._no_call(opened, final)
        head = None if is_list else _HEAD.fullmatch(body, 0, start)
        if head is None and not is_list:
            return self._as_text(opened, OPEN)
        end = self._end.find(body[start:])
        text = body[start:] if end is None else body[start : start + end]
        if end is None and not final:
            if head is not None and self._progress.is_due(len(text)):
                self._progress.update(PartialCall(head[1], partial_json(text)))
            return None
        found = _listed(text) if head is None else [PartialCall(head[1], partial_json(text))]
        if not found:
            return self._as_text(opened, OPEN) if end is not None else self._no_call(opened, final)
        calls = [self._progress.finished(*call) for call in found]
        return self._take_calls(calls, len(self._buffer) if end is None else opened + start + end)

    def _no_call(self, opened: int, final: bool) -> str:
        """What the end of the output cut off before it was a call is dropped."""
        body = self._buffer[opened:]
        if final and OPEN not in body and " " not in body.strip(SPACE):
            return self._as_text(len(self._buffer))[: opened - len(OPEN)]
        return self._as_text(opened, OPEN)


def _listed(text: str) -> list[PartialCall]:
    """All calls of a list, the last one maybe cut off; none if any is invalid."""
    found: list[PartialCall | None] = []
    rest = text[1:].lstrip(f"{SPACE},")
    while rest.startswith("{"):
        end = JsonEnd().find(rest)
        entry = rest if end is None else rest[:end]
        found.append(partial_json_call(entry) or call_from_json(parse_json(entry)))
        rest = "" if end is None else rest[end:].lstrip(f"{SPACE},")
    calls = [call for call in found if call is not None]
    cut_off = found[-1:] == [None] and not rest
    return calls if len(calls) == len(found) or (cut_off and len(calls) == len(found) - 1) else []
