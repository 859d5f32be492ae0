"""Streamed tokens -> text, reasoning and tool calls: complete characters only, without stop strings.

The result does not depend on how the tokens are split. Knows no model: `style` names the output format, chosen per family
(families/chat/dialects.toml).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from windlass.core.model import Frozen
from windlass.core.request import ToolCall
from windlass.errors import UnknownName
from windlass.text.parse.bare_json import BareJsonSplitter
from windlass.text.parse.brackets import BracketSplitter
from windlass.text.parse.channels import ChannelSplitter
from windlass.text.parse.reasoning import ReasoningSplitter
from windlass.text.parse.stop_filter import StopFilter
from windlass.text.parse.styles import BARE_JSON, BRACKETS, CHANNELS, PLAIN, STYLES, TAGS, style_marks, style_tags
from windlass.text.parse.tool_calls import TaggedCallSplitter
from windlass.text.tokenize.tokenizer import Tokenizer


class TextPiece(Frozen):
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    stopped: bool = False
    """A stop string was found; nothing follows."""


class TextStream:
    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Iterable[str] = (),
        style: str = PLAIN,
        starts_in_reasoning: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        prompt: Iterable[int] = (),
    ) -> None:
        """`tools`: their schemas determine argument types; an empty sequence: no tools, so calls are plain content.

        `prompt`: the preceding tokens, which determine the first token's leading space.
        """
        if style not in STYLES:
            raise UnknownName("output style", style, STYLES)
        self._decoder = tokenizer.incremental(prompt)
        self._markers = {number: mark for mark, number in special_marks(tokenizer, style).items()}
        self._stops = StopFilter(stop)
        self._parts = _splitter(style, starts_in_reasoning, tools)
        self._finished = False

    def push(self, token_ids: Iterable[int]) -> TextPiece:
        if self._finished:
            return TextPiece(stopped=self._stops.stopped)
        text = self._stops.push("".join(map(self._text, token_ids)))
        piece = self._split(text)
        return _joined(piece, self._close()) if self._stops.stopped else piece

    def finish(self) -> TextPiece:
        """The text held back, after the last token."""
        if self._finished:
            return TextPiece(stopped=self._stops.stopped)
        text = self._stops.push(self._decoder.finish()) + self._stops.finish()
        return _joined(self._split(text), self._close())

    def _text(self, token: int) -> str:
        marker = self._markers.get(token)
        return self._decoder.push(token) if marker is None else self._decoder.finish() + marker

    def _split(self, text: str) -> TextPiece:
        reasoning, content, calls = self._parts.push(text) if self._parts else ("", text, ())
        return TextPiece(content=content, reasoning=reasoning, tool_calls=calls, stopped=self._stops.stopped)

    def _close(self) -> TextPiece:
        self._finished = True
        reasoning, content, calls = self._parts.finish() if self._parts else ("", "", ())
        return TextPiece(content=content, reasoning=reasoning, tool_calls=calls, stopped=self._stops.stopped)


Parts = tuple[str, str, tuple[ToolCall, ...]]
"""Reasoning, content, calls."""


class _Splits(Protocol):
    def push(self, text: str) -> Parts: ...

    def finish(self) -> Parts: ...


class _SplitsCalls(Protocol):
    def push(self, text: str) -> tuple[str, tuple[ToolCall, ...]]: ...

    def finish(self) -> tuple[str, tuple[ToolCall, ...]]: ...


class _ReasoningThenCalls:
    """Reasoning between tags, then content with calls."""

    def __init__(self, reasoning_splitter: ReasoningSplitter, calls: _SplitsCalls | None) -> None:
        self._reasoning_splitter, self._calls = reasoning_splitter, calls

    def push(self, text: str) -> Parts:
        reasoning, content = self._reasoning_splitter.push(text)
        content, calls = self._calls.push(content) if self._calls else (content, ())
        return reasoning, content, calls

    def finish(self) -> Parts:
        reasoning, content = self._reasoning_splitter.finish()
        before, calls = self._calls.push(content) if self._calls else (content, ())
        after, more = self._calls.finish() if self._calls else ("", ())
        return reasoning, before + after, calls + more


def _splitter(style: str, starts_in_reasoning: bool, tools: Sequence[Mapping[str, Any]] | None) -> _Splits | None:
    has_tools = tools is None or bool(tools)
    if style == PLAIN:
        return None
    if style == CHANNELS:
        return ChannelSplitter(has_tools)
    calls = _call_splitter(style, tools or ()) if has_tools else None
    return _ReasoningThenCalls(ReasoningSplitter(starts_in_reasoning, style_tags(style)), calls)


def _call_splitter(style: str, tools: Sequence[Mapping[str, Any]]) -> _SplitsCalls | None:
    if style == TAGS:
        return None
    if style in BRACKETS:
        return BracketSplitter()
    return BareJsonSplitter() if style == BARE_JSON else TaggedCallSplitter(style, tools)


def special_marks(tokenizer: Tokenizer, style: str) -> dict[str, int]:
    """The markers of a style that are special tokens in this vocabulary, and so are not decoded as text."""
    found = {mark: tokenizer.token_id(mark) for mark in style_marks(style)}
    return {mark: number for mark, number in found.items() if number is not None and number in tokenizer.special_ids}


def _joined(first: TextPiece, second: TextPiece) -> TextPiece:
    return TextPiece(
        content=first.content + second.content,
        reasoning=first.reasoning + second.reasoning,
        tool_calls=first.tool_calls + second.tool_calls,
        stopped=second.stopped,
    )
