"""What a router remembers between requests: answers to exact repeats, and which model a conversation is with. Both are bounded."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from windlass.core.model import Frozen
from windlass.core.request import Delta, Request

MAX_CACHED_CHARACTERS = 100_000
"""Of one answer; longer ones are not kept."""


def repeat_key(request: Request) -> str | None:
    """None where a repeat may answer differently: sampled without a seed. Callers who share no prefixes share no answers either."""
    if not request.sampling.is_greedy and request.sampling.seed is None:
        return None
    same = msgspec.structs.replace(request, owner="", deadline_seconds=None)
    return hashlib.sha256(msgspec.json.encode(same)).hexdigest()


def conversation_key(request: Request) -> str | None:
    """The same for all turns of a chat: who asks, and everything before the first answer. None: not a chat."""
    messages = request.messages
    if not messages:
        return None
    first = next((place for place, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
    return hashlib.sha256(msgspec.json.encode([request.owner, request.cache_salt, messages[:first]])).hexdigest()


def is_continued(request: Request) -> bool:
    """There was an answer before."""
    return any(message.get("role") == "assistant" for message in request.messages or ())


class Bounded:
    """The most recently used entries, each for at most `seconds`."""

    def __init__(self, max_entries: int, seconds: float, clock: Callable[[], float]) -> None:
        self._max_entries, self._seconds, self._clock = max_entries, seconds, clock
        self._entries: OrderedDict[str, tuple[float, Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: str) -> Any:
        found = self._entries.get(key)
        if found is None:
            return None
        if self._clock() - found[0] > self._seconds:
            del self._entries[key]
            return None
        self._entries.move_to_end(key)
        return found[1]

    def put(self, key: str, value: Any) -> None:
        if self._max_entries < 1:
            return
        self._entries[key] = (self._clock(), value)
        self._entries.move_to_end(key)
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def forget(self, key: str) -> None:
        self._entries.pop(key, None)


class Pinned(Frozen):
    """A conversation's model, and what its client had asked for."""

    model: str
    variant: str


def is_cacheable(deltas: Sequence[Delta]) -> bool:
    size = sum(len(delta.content) + len(delta.reasoning) for delta in deltas)
    return size <= MAX_CACHED_CHARACTERS and bool(deltas) and deltas[-1].finish_reason in ("stop", "length")
