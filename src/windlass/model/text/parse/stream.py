"""Streamed tokens -> text, reasoning and tool calls: complete characters only, without stop strings.

The result does not depend on how the tokens are split. Knows no model: `style` names the output format, chosen per family
(model/families/chat/dialects.toml).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from windlass.core.model import Frozen
from windlass.core.request import CallPiece, ToolCall
from windlass.errors import UnknownName
from windlass.model.text.parse.bare_json import BareJsonSplitter
from windlass.model.text.parse.brackets import BracketSplitter
from windlass.model.text.parse.channels import ChannelSplitter
from windlass.model.text.parse.reasoning import ReasoningSplitter
from windlass.model.text.parse.splitter import ToolCallSplitter
from windlass.model.text.parse.stop_filter import StopFilter
from windlass.model.text.parse.styles import (
    BARE_JSON,
    BRACKETS,
    CHANNELS,
    FINAL_CHANNEL,
    PLAIN,
    STYLES,
    TAGS,
    style_marks,
    style_tags,
)
from windlass.model.text.parse.tool_calls import TaggedCallSplitter
from windlass.model.text.tokenize.tokenizer import Tokenizer


class TextPiece(Frozen):
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    call_pieces: tuple[CallPiece, ...] = ()
    """The same calls as they are written."""
    stopped: bool = False
    """A stop string or the last allowed call was found; nothing follows."""


class TextStream:
    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Iterable[str] = (),
        style: str = PLAIN,
        starts_in_reasoning: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        one_call: bool = False,
        must_call: bool = False,
        begun: bool = False,
        prompt: Iterable[int] = (),
    ) -> None:
        """`one_call`: the output ends after a call. `must_call`: a grammar holds it to calls.

        `begun`: the answer has begun in the prompt, so no reasoning comes first.

        `tools`: their schemas determine argument types; an empty sequence: no tools, so calls are plain content.

        `prompt`: the preceding tokens, which determine the first token's leading space.
        """
        if style not in STYLES:
            raise UnknownName("output style", style, STYLES)
        self._decoder = tokenizer.incremental(prompt)
        self._markers = {number: mark for mark, number in special_marks(tokenizer, style).items()}
        self._stops = StopFilter(stop)
        self._parts = _splitter(style, starts_in_reasoning, tools, begun, must_call)
        self._one_call = one_call
        self._finished = self._stopped = False
        self.num_reasoning_tokens = 0

    def push(self, token_ids: Iterable[int]) -> TextPiece:
        if self._finished:
            return TextPiece(stopped=self._stopped)
        if self._parts is None:
            return self._pushed(token_ids)
        found: TextPiece | None = None
        for token in token_ids:
            piece = self._pushed((token,))
            found = piece if found is None else joined_pieces(found, piece)
            if self._finished:
                break
        return found or TextPiece()

    def finish(self) -> TextPiece:
        """The text held back, after the last token."""
        if self._finished:
            return TextPiece(stopped=self._stopped)
        text = self._stops.push(self._decoder.finish()) + self._stops.finish()
        self._stopped = self._stops.stopped
        return joined_pieces(self._split(text), self._close())

    def _pushed(self, token_ids: Iterable[int]) -> TextPiece:
        was_reasoning = self._parts is not None and self._parts.is_reasoning
        text = self._stops.push("".join(map(self._text, token_ids)))
        piece = self._split(text)
        self.num_reasoning_tokens += was_reasoning or (self._parts is not None and self._parts.is_reasoning)
        if self._one_call and piece.tool_calls:
            self._finished = self._stopped = True
            return _first_call(piece)
        self._stopped = self._stops.stopped
        return joined_pieces(piece, self._close()) if self._stopped else piece

    def _text(self, token: int) -> str:
        marker = self._markers.get(token)
        return self._decoder.push(token) if marker is None else self._decoder.finish() + marker

    def _split(self, text: str) -> TextPiece:
        if self._parts is None:
            return TextPiece(content=text, stopped=self._stops.stopped)
        return self._piece(*self._parts.push(text))

    def _close(self) -> TextPiece:
        self._finished = True
        if self._parts is None:
            return TextPiece(stopped=self._stops.stopped)
        piece = self._piece(*self._parts.finish())
        return _first_call(piece) if self._one_call and piece.tool_calls else piece

    def _piece(self, reasoning: str, content: str, calls: tuple[ToolCall, ...]) -> TextPiece:
        pieces = self._parts.take_pieces() if self._parts is not None else ()
        return TextPiece(content=content, reasoning=reasoning, tool_calls=calls, call_pieces=pieces, stopped=self._stops.stopped)


Parts = tuple[str, str, tuple[ToolCall, ...]]
"""Reasoning, content, calls."""


class _Splits(Protocol):
    @property
    def is_reasoning(self) -> bool: ...

    def push(self, text: str) -> Parts: ...

    def finish(self) -> Parts: ...

    def take_pieces(self) -> tuple[CallPiece, ...]: ...


class _ReasoningThenCalls:
    """Reasoning between tags, then content with calls."""

    def __init__(self, reasoning_splitter: ReasoningSplitter, calls: ToolCallSplitter | None) -> None:
        self._reasoning_splitter, self._calls = reasoning_splitter, calls

    @property
    def is_reasoning(self) -> bool:
        return self._reasoning_splitter.is_inside

    def take_pieces(self) -> tuple[CallPiece, ...]:
        return self._calls.take_pieces() if self._calls else ()

    def push(self, text: str) -> Parts:
        reasoning, content = self._reasoning_splitter.push(text)
        content, calls = self._calls.push(content) if self._calls else (content, ())
        return reasoning, content, calls

    def finish(self) -> Parts:
        reasoning, content = self._reasoning_splitter.finish()
        before, calls = self._calls.push(content) if self._calls else (content, ())
        after, more = self._calls.finish() if self._calls else ("", ())
        return reasoning, before + after, calls + more


def _splitter(
    style: str, starts_in_reasoning: bool, tools: Sequence[Mapping[str, Any]] | None, begun: bool, must_call: bool
) -> _Splits | None:
    has_tools = tools is None or bool(tools)
    if style == PLAIN:
        return None
    if style == CHANNELS:
        return ChannelSplitter(has_tools, FINAL_CHANNEL if begun else None)
    calls = _call_splitter(style, tools or ()) if has_tools else None
    if calls is not None:
        calls.is_required = must_call
    return _ReasoningThenCalls(ReasoningSplitter(starts_in_reasoning, style_tags(style), begun), calls)


def _call_splitter(style: str, tools: Sequence[Mapping[str, Any]]) -> ToolCallSplitter | None:
    if style == TAGS:
        return None
    if style in BRACKETS:
        return BracketSplitter()
    return BareJsonSplitter() if style == BARE_JSON else TaggedCallSplitter(style, tools)


def special_marks(tokenizer: Tokenizer, style: str) -> dict[str, int]:
    """The markers of a style that are special tokens in this vocabulary, and so are not decoded as text."""
    found = {mark: tokenizer.token_id(mark) for mark in style_marks(style)}
    return {mark: number for mark, number in found.items() if number is not None and number in tokenizer.special_ids}


def joined_pieces(first: TextPiece, second: TextPiece) -> TextPiece:
    return TextPiece(
        content=first.content + second.content,
        reasoning=first.reasoning + second.reasoning,
        tool_calls=first.tool_calls + second.tool_calls,
        call_pieces=first.call_pieces + second.call_pieces,
        stopped=second.stopped,
    )


def _first_call(piece: TextPiece) -> TextPiece:
    """The output ends with it."""
    call = piece.tool_calls[0]
    return TextPiece(
        content=piece.content,
        reasoning=piece.reasoning,
        tool_calls=(call,),
        call_pieces=tuple(part for part in piece.call_pieces if part.id == call.id),
        stopped=True,
    )
