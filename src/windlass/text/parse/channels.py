"""Messages with headers, as gpt-oss writes them (https://github.com/openai/harmony): an answer is one or several of

<|channel|>analysis<|message|>reasoning<|end|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"k": 1}<|call|>
<|start|>assistant<|channel|>final<|message|>content<|return|>

The prompt ends with <|start|>assistant, so the first header has none; a recipient may also stand before the channel. The mark that
ends an answer is a stop token and is mostly not seen here. A call comes out whole; what is no call comes out as the text it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, cast

from windlass.core.request import ToolCall
from windlass.text.parse.stop_filter import SPACE, unfinished
from windlass.text.parse.styles import CHANNEL_MARKS
from windlass.text.parse.tool_calls import decoded, made_call

MESSAGE, START = "<|message|>", "<|start|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_HEADS = ("<|start|>", "<|channel|>", "assistant", "to=")
_OWN = "functions."

Parts = tuple[str, str, tuple[ToolCall, ...]]
"""Reasoning, content, calls."""


class ChannelSplitter:
    def __init__(self, has_tools: bool = True) -> None:
        self._has_tools = has_tools
        self._waiting = ""
        self._header: str | None = None
        """Of the message whose body is being read; None: a header comes."""
        self._last: dict[str, bool] = {}
        """What has been said already, so that two messages of a kind stay apart."""
        self._spoken = False

    def push(self, text: str) -> Parts:
        self._waiting += text
        return self._split(final=False)

    def finish(self) -> Parts:
        return self._split(final=True)

    def _split(self, final: bool) -> Parts:
        parts = _Parts()
        while self._step(parts, final):
            pass
        return parts.reasoning, parts.content, tuple(parts.calls)

    def _step(self, parts: _Parts, final: bool) -> bool:
        if not self._waiting:
            return False
        if self._header is None:
            return self._head(parts, final)
        return self._call(parts, final) if self._is_call else self._body(parts, final)

    def _head(self, parts: _Parts, final: bool) -> bool:
        text = self._waiting.lstrip(SPACE)
        end = self._waiting.find(MESSAGE)
        is_head = any(text.startswith(head) or head.startswith(text) for head in _HEADS)
        if is_head and end >= 0:
            self._header, self._waiting = self._waiting[:end], self._waiting[end + len(MESSAGE) :]
            self._spoken = False
            return True
        if is_head and not final:
            return False
        self._header, self._spoken = "", False  # a body without a header
        if text.startswith(
            START
        ):  # nothing more comes, and it is none; as the end of a body it would be looked at again for ever
            end = self._waiting.index(START) + len(START)
            self._say(parts.say, "final", self._waiting[:end])
            self._waiting = self._waiting[end:]
        return True

    @property
    def _is_call(self) -> bool:
        return self._has_tools and _RECIPIENT.search(self._header or "") is not None

    def _body(self, parts: _Parts, final: bool) -> bool:
        begin, mark = _first(self._waiting, ENDS)
        end = begin if mark else len(self._waiting) - (0 if final else unfinished(self._waiting, ENDS))
        is_reasoning = _channel(self._header or "") == "analysis"
        self._say(parts.think if is_reasoning else parts.say, "analysis" if is_reasoning else "final", self._waiting[:end])
        self._waiting = self._waiting[end:]
        return self._ended(mark)

    def _call(self, parts: _Parts, final: bool) -> bool:
        begin, mark = _first(self._waiting, ENDS)
        if not mark and not final:
            return False
        body, self._waiting = (self._waiting[:begin], self._waiting[begin:]) if mark else (self._waiting, "")
        recipient = _RECIPIENT.search(self._header or "")
        arguments = decoded(body) if recipient else None
        if recipient and isinstance(arguments, dict):
            parts.calls.append(made_call(recipient[1].removeprefix(_OWN), cast(dict[str, Any], arguments)))
        else:
            self._say(parts.say, "final", f"{self._header}{MESSAGE}{body}")
        self._ended(mark)
        return bool(mark)

    def _ended(self, mark: str) -> bool:
        if mark:
            self._header, self._waiting = None, self._waiting if mark == START else self._waiting[len(mark) :]
        return bool(mark)

    def _say(self, say: Callable[[str], None], kind: str, text: str) -> None:
        if not text:
            return
        if not self._spoken and self._last.get(kind):
            say("\n\n")
        self._spoken = self._last[kind] = True
        say(text)


class _Parts:
    def __init__(self) -> None:
        self.reasoning = self.content = ""
        self.calls: list[ToolCall] = []

    def think(self, text: str) -> None:
        self.reasoning += text

    def say(self, text: str) -> None:
        self.content += text


def _channel(header: str) -> str:
    found = _CHANNEL.search(header)
    return found[1] if found else ""


def _first(text: str, marks: tuple[str, ...]) -> tuple[int, str]:
    found = [(begin, mark) for mark in marks if (begin := text.find(mark)) >= 0]
    return min(found, default=(-1, ""))


assert set(ENDS) < set(CHANNEL_MARKS)
