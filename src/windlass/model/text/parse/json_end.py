"""Finds the end of a JSON object or list in streamed text. Does not validate it."""

from __future__ import annotations

import re

_TURN = re.compile(r'["{}\[\]\\]')
_IN_STRING = re.compile(r'["\\]')


class JsonEnd:
    """Scans every character once."""

    def __init__(self) -> None:
        self._position = 0
        self._depth = 0
        self._in_string = False

    def find(self, text: str) -> int | None:
        """The position after the value that `text` starts with, or None if incomplete. `text` must only grow between calls."""
        while found := (_IN_STRING if self._in_string else _TURN).search(text, self._position):
            mark = found[0]
            if mark == "\\":
                if found.end() == len(text):  # the escaped character has not arrived
                    self._position = found.start()
                    return None
                self._position = found.end() + 1
                continue
            self._position = found.end()
            if mark == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if mark in "{[" else -1
                if self._depth <= 0:
                    return self._position
        self._position = len(text)
        return None
