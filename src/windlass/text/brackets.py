"""Tool calls behind a mark, as the Mistral family writes them:

[TOOL_CALLS][{"name": "f", "arguments": {"k": 1}}, ...]        to version 7 of its tokenizers
[TOOL_CALLS]f{"k": 1}                                          version 11
[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"k": 1}                  version 13, with or without the id

Calls come out when their JSON is whole. What is no call comes out as the text it is. Space around calls is no content.
"""

from __future__ import annotations

import re
from typing import Any, cast

from windlass.core.request import ToolCall
from windlass.text.held import SPACE, unfinished
from windlass.text.json_end import JsonEnd
from windlass.text.tools import call_from, decoded, made_call

OPEN = "[TOOL_CALLS]"
ID_CHARACTERS = 9
"""Templates of this family refuse ids that are shorter, and some those that are longer."""
_HEAD = re.compile(r"\s*([^\s\[\]{}<>=\"]+)(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*")
_LONGEST_HEAD = 256


class BracketSplitter:
    def __init__(self) -> None:
        self._waiting = ""
        self._inside = self._after_call = False
        self._end = JsonEnd()

    def push(self, text: str) -> tuple[str, tuple[ToolCall, ...]]:
        self._waiting += text
        return self._split(final=False)

    def finish(self) -> tuple[str, tuple[ToolCall, ...]]:
        content, calls = self._split(final=True)
        rest, self._waiting = self._waiting, ""
        return content + rest, calls

    def _split(self, final: bool) -> tuple[str, tuple[ToolCall, ...]]:
        content: list[str] = []
        calls: list[ToolCall] = []
        while True:
            if not self._inside:
                content.append(self._content())
            if not self._inside:
                return "".join(content), tuple(calls)
            found = self._found()
            if found is None and not final:
                return "".join(content), tuple(calls)
            if found:
                calls += found
            else:
                content.append(self._as_text())

    def _content(self) -> str:
        text = self._waiting.lstrip(SPACE) if self._after_call else self._waiting
        begin = text.find(OPEN)
        self._inside, self._end = begin >= 0, JsonEnd()
        end = begin if self._inside else len(text) - unfinished(text, (OPEN,))
        certain = text[:end].rstrip(SPACE)
        self._waiting = text[len(certain) :]
        self._after_call = self._after_call and not text
        return certain

    def _found(self) -> list[ToolCall] | None:
        """Calls; an empty list: this is none; None: it is not known yet."""
        opened = self._waiting.index(OPEN) + len(OPEN)
        body = self._waiting[opened:]
        stripped = body.lstrip(SPACE)
        if not stripped:
            return None
        start = len(body) - len(stripped) if stripped[0] == "[" else body.find("{")
        if start < 0:
            return None if OPEN not in body and len(body) <= _LONGEST_HEAD else []
        head = None if stripped[0] == "[" else _HEAD.fullmatch(body, 0, start)
        if head is None and stripped[0] != "[":
            return []
        end = self._end.find(body[start:])
        if end is None:
            return None
        calls = _listed(body[start : start + end]) if head is None else _named(head[1], body[start : start + end])
        if calls:
            self._inside, self._after_call, self._waiting = False, True, body[start + end :]
        return calls

    def _as_text(self) -> str:
        opened = self._waiting.index(OPEN) + len(OPEN)
        text, self._waiting, self._inside = self._waiting[:opened], self._waiting[opened:], False
        self._after_call = False
        return text


def _listed(text: str) -> list[ToolCall]:
    """All of them, or none where one is no call."""
    values = decoded(text)
    found = [call_from(value, ID_CHARACTERS) for value in cast(list[Any], values)] if isinstance(values, list) else []
    calls = [call for call in found if call is not None]
    return calls if len(calls) == len(found) else []


def _named(name: str, text: str) -> list[ToolCall]:
    arguments = decoded(text)
    return [made_call(name, cast(dict[str, Any], arguments), ID_CHARACTERS)] if isinstance(arguments, dict) else []
