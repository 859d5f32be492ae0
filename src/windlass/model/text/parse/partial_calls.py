"""Tool calls that are still being written: the name, and the arguments as far as they are certain.

The functions here are monotonic: what they return for a text is a beginning of what they return for any continuation of it. So the
difference can be sent as it grows, and a call that the length cuts off is what was sent.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple
from uuid import uuid4

from windlass.core.request import CallPiece, ToolCall
from windlass.model.text.parse.json_end import JsonEnd

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)', re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x1f]")


GROWTH = 64
SHORT = 1024
"""Characters of a call that is looked at with every token."""


class PartialCall(NamedTuple):
    name: str
    arguments: str
    """A beginning of JSON."""


def partial_json_call(body: str) -> PartialCall | None:
    """`{"name": "f", "arguments": {...`; None: it may not be one, or the arguments have not begun."""
    head = _HEAD.match(body)
    if head is None:
        return None
    try:
        name = json.loads(head[1], strict=False)
        name.encode()  # fails on half a surrogate pair
    except ValueError:
        return None
    return PartialCall(name, partial_json(body[head.end() :]))


def partial_json(text: str) -> str:
    """The JSON object that `text` starts with, to its end or as far as it goes, as the model wrote it.

    Models write line breaks within strings, which JSON does not allow: they are escaped.
    """
    end = JsonEnd().find(text)
    raw = text if end is None else text[:end]
    if _CONTROL.search(raw) is None:
        return raw
    return _STRING.sub(lambda string: _CONTROL.sub(_escaped, string[0]), raw)


def _escaped(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]


def new_call_id(characters: int | None = None) -> str:
    """`characters`: the length that a template requires."""
    number = uuid4().hex
    return f"call_{number[:24]}" if characters is None else number[:characters]


class CallProgress:
    """Which part of the current call has been returned as pieces."""

    def __init__(self, id_characters: int | None = None) -> None:
        self._id_characters = id_characters
        self._id = ""
        self._sent = self._seen = 0
        self._pieces: list[CallPiece] = []

    def is_due(self, length: int) -> bool:
        """Whether a call of so many characters is looked at again. The whole of it is read each time, so a long one is read when it has
        grown by a part, not for every token: thousands of tokens of code would otherwise take seconds."""
        if length - self._seen < self._seen // GROWTH - SHORT // GROWTH:
            return False
        self._seen = length
        return True

    def update(self, partial: PartialCall | None) -> None:
        if partial is None:
            return
        name = ""
        if not self._id:
            self._id, name = new_call_id(self._id_characters), partial.name
        rest = partial.arguments[self._sent :]
        if name or rest:
            self._pieces.append(CallPiece(id=self._id, name=name, arguments=rest))
        self._sent = len(partial.arguments)

    def finished(self, name: str, arguments: str) -> ToolCall:
        """The current call is complete, or was cut off; the next one may begin."""
        self.update(PartialCall(name, arguments))
        call = ToolCall(id=self._id, name=name, arguments=arguments)
        self._id, self._sent, self._seen = "", 0, 0
        return call

    def take(self) -> tuple[CallPiece, ...]:
        """The pieces since the last time."""
        if not self._pieces:
            return ()
        found, self._pieces = tuple(self._pieces), []
        return found
