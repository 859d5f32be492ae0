"""Stop strings in streamed text, and how much text must be held back because a marker may be incomplete."""

from __future__ import annotations

from collections.abc import Iterable

SPACE = " \t\r\n"
"""Whitespace around tags; not part of the content."""


def partial_match_length(text: str, words: Iterable[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of one of `words`."""
    known = tuple(words)
    longest = max(map(len, known), default=1) - 1
    tail = text[-longest:] if longest else ""
    for start in range(len(tail)):
        if any(len(word) > len(tail) - start and word.startswith(tail[start:]) for word in known):
            return len(tail) - start
    return 0


class StopFilter:
    """Text up to the first stop string, which is not returned. A possible beginning of one is held back.

    The stop string that completes first ends the text, so the result does not depend on how the text is split.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._buffer: str = ""
        self.stopped = False

    def push(self, text: str) -> str:
        if self.stopped:
            return ""
        if not self._stops:
            return text
        text = self._buffer + text
        found = [(begin + len(stop), begin) for stop in self._stops if (begin := text.find(stop)) >= 0]
        if found:
            self.stopped, self._buffer = True, ""
            return text[: min(found)[1]]
        cut = len(text) - partial_match_length(text, self._stops)
        self._buffer = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        text, self._buffer = self._buffer, ""
        return text
