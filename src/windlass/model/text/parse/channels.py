"""The channel format of gpt-oss (https://github.com/openai/harmony): the output is one or more of

<|channel|>analysis<|message|>reasoning<|end|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"k": 1}<|call|>
<|start|>assistant<|channel|>final<|message|>content<|return|>

The prompt ends with <|start|>assistant, so the first header lacks it; a recipient may also precede the channel. The final marker is
a stop token and usually not seen here. What is no call is returned as text, without its header.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from windlass.core.request import CallPiece, ToolCall
from windlass.model.text.parse.partial_calls import CallProgress, PartialCall, partial_json
from windlass.model.text.parse.stop_filter import SPACE, partial_match_length
from windlass.model.text.parse.styles import CHANNEL_MARKS

MESSAGE, START = "<|message|>", "<|start|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_HEADER = re.compile(r"\s*(?:<\|start\|>\w*\s*)?(?:<\|channel\|>\w*\s*)?")
_HEADS = ("<|start|>", "<|channel|>", "assistant", "to=")
_OWN = "functions."

Parts = tuple[str, str, tuple[ToolCall, ...]]
"""Reasoning, content, calls."""


class ChannelSplitter:
    def __init__(self, has_tools: bool = True, header: str | None = None) -> None:
        """`header`: of the message in which the output begins."""
        self._has_tools = has_tools
        self._buffer = ""
        self._progress = CallProgress()
        self._header: str | None = header
        """Header of the current message; None while a header is being read."""
        self._last: dict[str, bool] = {}
        """Channels that already have text, so that a second message of a kind is separated by a blank line."""
        self._has_text = False

    def push(self, text: str) -> Parts:
        self._buffer += text
        return self._split(final=False)

    def finish(self) -> Parts:
        return self._split(final=True)

    def take_pieces(self) -> tuple[CallPiece, ...]:
        return self._progress.take()

    @property
    def is_reasoning(self) -> bool:
        return self._header is not None and _channel(self._header) == "analysis"

    def _split(self, final: bool) -> Parts:
        parts = _ChannelParts()
        while self._step(parts, final):
            pass
        return parts.reasoning, parts.content, tuple(parts.calls)

    def _step(self, parts: _ChannelParts, final: bool) -> bool:
        if not self._buffer and not (final and self._is_call):
            return False
        if self._header is None:
            return self._head(parts, final)
        return self._call(parts, final) if self._is_call else self._body(parts, final)

    def _head(self, parts: _ChannelParts, final: bool) -> bool:
        text = self._buffer.lstrip(SPACE)
        end = self._buffer.find(MESSAGE)
        is_head = any(text.startswith(head) or head.startswith(text) for head in _HEADS)
        if is_head and end >= 0:
            self._header, self._buffer = self._buffer[:end], self._buffer[end + len(MESSAGE) :]
            self._has_text = False
            return True
        if is_head and not final:
            return False
        header = _HEADER.match(self._buffer)
        assert header is not None
        if header[0].strip(SPACE):  # cut off within a header
            self._buffer = self._buffer[header.end() :]
        self._header, self._has_text = "", False  # a body without a header
        return True

    @property
    def _is_call(self) -> bool:
        return self._has_tools and _RECIPIENT.search(self._header or "") is not None

    def _body(self, parts: _ChannelParts, final: bool) -> bool:
        begin, mark = _first(self._buffer, ENDS)
        end = begin if mark else len(self._buffer) - (0 if final else partial_match_length(self._buffer, ENDS))
        is_reasoning = _channel(self._header or "") == "analysis"
        self._emit(
            parts.add_reasoning if is_reasoning else parts.add_content,
            "analysis" if is_reasoning else "final",
            self._buffer[:end],
        )
        self._buffer = self._buffer[end:]
        return self._ended(mark)

    def _call(self, parts: _ChannelParts, final: bool) -> bool:
        recipient = _RECIPIENT.search(self._header or "")
        assert recipient is not None
        name = recipient[1].removeprefix(_OWN)
        begin, mark = _first(self._buffer, ENDS)
        body = (self._buffer[:begin] if mark else self._buffer).lstrip(SPACE)
        if not mark and not final:
            if body.startswith("{") and self._progress.is_due(len(body)):
                self._progress.update(PartialCall(name, partial_json(body[: len(body) - partial_match_length(body, ENDS)])))
            return False
        self._buffer = self._buffer[begin:] if mark else ""
        if body.startswith("{") or not body:
            parts.calls.append(self._progress.finished(name, partial_json(body) or "{}"))
        else:
            self._emit(parts.add_content, "final", body)
        self._ended(mark)
        return bool(mark)

    def _ended(self, mark: str) -> bool:
        if mark:
            self._header, self._buffer = None, self._buffer if mark == START else self._buffer[len(mark) :]
        return bool(mark)

    def _emit(self, add: Callable[[str], None], kind: str, text: str) -> None:
        if not text:
            return
        if not self._has_text and self._last.get(kind):
            add("\n\n")
        self._has_text = self._last[kind] = True
        add(text)


class _ChannelParts:
    def __init__(self) -> None:
        self.reasoning = self.content = ""
        self.calls: list[ToolCall] = []

    def add_reasoning(self, text: str) -> None:
        self.reasoning += text

    def add_content(self, text: str) -> None:
        self.content += text


def _channel(header: str) -> str:
    found = _CHANNEL.search(header)
    return found[1] if found else ""


def _first(text: str, marks: tuple[str, ...]) -> tuple[int, str]:
    found = [(begin, mark) for mark in marks if (begin := text.find(mark)) >= 0]
    return min(found, default=(-1, ""))


assert set(ENDS) < set(CHANNEL_MARKS)
