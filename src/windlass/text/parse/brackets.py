"""Tool calls in the format of the Mistral family:

[TOOL_CALLS][{"name": "f", "arguments": {"k": 1}}, ...]        to version 7 of its tokenizers
[TOOL_CALLS]f{"k": 1}                                          version 11
[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"k": 1}                  version 13, with or without the id

A call is returned when its JSON is complete. Invalid calls are returned as text. Whitespace around calls is dropped.
"""

from __future__ import annotations

import re
from typing import Any, cast

from windlass.core.request import ToolCall
from windlass.text.parse.json_end import JsonEnd
from windlass.text.parse.splitter import ToolCallSplitter
from windlass.text.parse.stop_filter import SPACE
from windlass.text.parse.tool_calls import new_tool_call, parse_json, tool_call_from_json

OPEN = "[TOOL_CALLS]"
ID_CHARACTERS = 9
"""Templates of this family require ids of at least, some of exactly, this length."""
_HEAD = re.compile(r"\s*([^\s\[\]{}<>=\"]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*")
_LONGEST_HEAD = 256


class BracketSplitter(ToolCallSplitter):
    def __init__(self) -> None:
        super().__init__(OPEN)
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
            return None if may_become_one else self._as_text(opened)
        head = None if is_list else _HEAD.fullmatch(body, 0, start)
        if head is None and not is_list:
            return self._as_text(opened)
        end = self._end.find(body[start:])
        if end is None:
            return self._as_text(opened) if final else None
        text = body[start : start + end]
        calls = _listed(text) if head is None else _named(head[1], text)
        return self._take_calls(calls, opened + start + end) if calls else self._as_text(opened)


def _listed(text: str) -> list[ToolCall]:
    """All of them, or none if any is invalid."""
    values = parse_json(text)
    found = [tool_call_from_json(value, ID_CHARACTERS) for value in cast(list[Any], values)] if isinstance(values, list) else []
    calls = [call for call in found if call is not None]
    return calls if len(calls) == len(found) else []


def _named(name: str, text: str) -> list[ToolCall]:
    arguments = parse_json(text)
    return [new_tool_call(name, cast(dict[str, Any], arguments), ID_CHARACTERS)] if isinstance(arguments, dict) else []
