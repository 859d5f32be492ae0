"""How much of a text's end must wait, because what comes next may make it a word that is looked for."""

from __future__ import annotations

from collections.abc import Iterable

SPACE = " \t\r\n"
"""What a model sets around its tags; no part of what is between them."""


def unfinished(text: str, words: Iterable[str]) -> int:
    """Length of the longest end of `text` that is the beginning, and not the whole, of one of `words`."""
    known = tuple(words)
    longest = max(map(len, known), default=1) - 1
    tail = text[-longest:] if longest else ""
    for start in range(len(tail)):
        if any(len(word) > len(tail) - start and word.startswith(tail[start:]) for word in known):
            return len(tail) - start
    return 0


class StopFilter:
    """Text up to the first stop string. What may still become one waits; a stop itself never comes out.

    Of several, the one that is complete first ends the text, so that it does not matter in what pieces the text arrives.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._waiting: str = ""
        self.stopped = False

    def push(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._waiting + text
        found = [(begin + len(stop), begin) for stop in self._stops if (begin := text.find(stop)) >= 0]
        if found:
            self.stopped, self._waiting = True, ""
            return text[: min(found)[1]]
        cut = len(text) - unfinished(text, self._stops)
        self._waiting = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        text, self._waiting = self._waiting, ""
        return text
