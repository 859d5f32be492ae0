"""Where a JSON object or list ends, as its text arrives. What is between its brackets is not judged here."""

from __future__ import annotations

import re

_TURN = re.compile(r'["{}\[\]\\]')
_IN_STRING = re.compile(r'["\\]')


class JsonEnd:
    """Looks at every character once."""

    def __init__(self) -> None:
        self._position = 0
        self._depth = 0
        self._in_string = False

    def find(self, text: str) -> int | None:
        """Behind the last bracket of the value that `text` begins with; `text` only ever grows. None: it is not there yet."""
        while found := (_IN_STRING if self._in_string else _TURN).search(text, self._position):
            mark = found[0]
            if mark == "\\":
                if found.end() == len(text):  # what it escapes is still to come
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
