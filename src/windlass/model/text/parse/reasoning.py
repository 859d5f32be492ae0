"""Separates reasoning from the answer in streamed text.

`<think>` counts only at the beginning; later it is plain text. If the prompt already ends with it (GLM-4.7, INTELLECT-3), the output
has only the closing tag. Whitespace around the tags is dropped.
"""

from __future__ import annotations

from windlass.model.text.parse.stop_filter import SPACE, partial_match_length

OPEN, CLOSE = TAGS = "<think>", "</think>"


def opens_reasoning(prompt: str, tags: tuple[str, str] = TAGS) -> bool:
    """Whether a rendered prompt ends with an open reasoning tag."""
    return prompt.rstrip(SPACE).endswith(tags[0])


class ReasoningSplitter:
    def __init__(self, starts_in_reasoning: bool = False, tags: tuple[str, str] = TAGS, begun: bool = False) -> None:
        """`begun`: the answer has begun already, so an opening tag is text."""
        self._open, self._close = tags
        self._inside = starts_in_reasoning
        self._begun = begun
        """Whether the opening tag has been found or ruled out."""
        self._at_edge = starts_in_reasoning
        """Directly after a tag: whitespace is dropped."""
        self._buffer = ""

    @property
    def is_inside(self) -> bool:
        return self._inside

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, content) as far as certain."""
        text, self._buffer = self._buffer + text, ""
        if not self._begun:
            text = self._begin(text)
        reasoning = ""
        if self._begun and self._inside:
            reasoning, text = self._reason(text)
        return reasoning, self._after_tag(text)

    def finish(self) -> tuple[str, str]:
        text, self._buffer, self._begun = self._after_tag(self._buffer), "", True
        return (text, "") if self._inside else ("", text)

    def _begin(self, text: str) -> str:
        stripped = text.lstrip(SPACE)
        if stripped.startswith(self._open):
            self._begun = self._inside = self._at_edge = True
            return stripped[len(self._open) :]
        if self._open.startswith(stripped):  # it may still become the tag
            self._buffer = text
            return ""
        self._begun = True
        return text

    def _reason(self, text: str) -> tuple[str, str]:
        text = self._after_tag(text)
        end = text.find(self._close)
        if end >= 0:
            self._inside, self._at_edge = False, True
            return text[:end].rstrip(SPACE), text[end + len(self._close) :]
        certain = text[: len(text) - partial_match_length(text, (self._close,))].rstrip(SPACE)
        self._buffer = text[len(certain) :]
        return certain, ""

    def _after_tag(self, text: str) -> str:
        if self._at_edge:
            text = text.lstrip(SPACE)
            self._at_edge = not text
        return text
