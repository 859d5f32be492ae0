"""Tokens as they arrive -> text as it may be shown: whole characters, no stop strings, reasoning and tool calls apart.

Whatever the pieces in which tokens come, the parts add up to the same. Knows no model: `style` names how its text is written, and
who knows the model chooses it (families/dialects.toml).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from windlass.core.model import Frozen
from windlass.core.request import ToolCall
from windlass.errors import UnknownName
from windlass.text import reasoning, tools
from windlass.text.held import StopFilter
from windlass.text.reasoning import ReasoningSplitter
from windlass.text.tokenizer import Tokenizer
from windlass.text.tools import CallSplitter

PLAIN = "plain"
"""All is content."""
TAGS = "tags"
"""Reasoning between tags. The styles named after a form of tool call have it too."""
STYLES = (PLAIN, TAGS, *tools.FORMS)


class Piece(Frozen):
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    stopped: bool = False
    """A stop string was met; nothing comes after it."""


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
        """`tools` type the arguments of calls; an empty sequence: none were offered, so what looks like a call is content.

        `prompt`: the tokens before, on which the first one's space depends.
        """
        if style not in STYLES:
            raise UnknownName("style of text", style, STYLES)
        self._decoder = tokenizer.incremental(prompt)
        self._markers = _markers(tokenizer, style)
        self._stops = StopFilter(stop)
        self._reasoning = ReasoningSplitter(starts_in_reasoning) if style != PLAIN else None
        self._calls = CallSplitter(style, tools or ()) if style not in (PLAIN, TAGS) and (tools is None or tools) else None
        self._finished = False

    def push(self, token_ids: Iterable[int]) -> Piece:
        if self._finished:
            return Piece(stopped=self._stops.stopped)
        text = self._stops.push("".join(map(self._text, token_ids)))
        piece = self._split(text)
        return _joined(piece, self._close()) if self._stops.stopped else piece

    def finish(self) -> Piece:
        """What was held back, when no more tokens come."""
        if self._finished:
            return Piece(stopped=self._stops.stopped)
        text = self._stops.push(self._decoder.finish()) + self._stops.finish()
        return _joined(self._split(text), self._close())

    def _text(self, token: int) -> str:
        marker = self._markers.get(token)
        return self._decoder.push(token) if marker is None else self._decoder.finish() + marker

    def _split(self, text: str) -> Piece:
        thought, content = self._reasoning.push(text) if self._reasoning else ("", text)
        content, calls = self._calls.push(content) if self._calls else (content, ())
        return Piece(content=content, reasoning=thought, tool_calls=calls, stopped=self._stops.stopped)

    def _close(self) -> Piece:
        self._finished = True
        thought, content = self._reasoning.finish() if self._reasoning else ("", "")
        before, calls = self._calls.push(content) if self._calls else (content, ())
        after, more = self._calls.finish() if self._calls else ("", ())
        return Piece(content=before + after, reasoning=thought, tool_calls=calls + more, stopped=self._stops.stopped)


def _markers(tokenizer: Tokenizer, style: str) -> dict[int, str]:
    """Tags that this vocabulary counts among the special tokens, which are no text otherwise."""
    wanted = () if style == PLAIN else (reasoning.OPEN, reasoning.CLOSE, *(tools.MARKERS if style != TAGS else ()))
    found = {tokenizer.token_id(tag): tag for tag in wanted}
    return {number: tag for number, tag in found.items() if number is not None and number in tokenizer.special_ids}


def _joined(first: Piece, second: Piece) -> Piece:
    return Piece(
        content=first.content + second.content,
        reasoning=first.reasoning + second.reasoning,
        tool_calls=first.tool_calls + second.tool_calls,
        stopped=second.stopped,
    )
