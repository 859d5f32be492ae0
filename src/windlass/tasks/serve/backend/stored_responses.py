"""Responses that are kept for a while, so that a later request can continue them. In memory: a restart forgets them.

Bounded in number and size, and each for a limited time. Where there is no room, whoever holds most loses the oldest one, so that one key
cannot push out another's. Whoever stored one is the only one who can read it.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_RESPONSES = 2000
MAX_BYTES = 64 * 2**20
MAX_SECONDS = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class StoredResponse:
    owner: str
    """Of whom the response is: a key, or an address."""
    expires: float
    response: bytes
    """The response object, as JSON."""
    items: bytes
    """All items before its output, as a JSON list."""

    @property
    def size(self) -> int:
        return len(self.response) + len(self.items)


class StoredResponses:
    def __init__(
        self,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        max_seconds: float = MAX_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_responses, self._max_bytes, self._max_seconds, self._clock = max_responses, max_bytes, max_seconds, clock
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0
        self._by_owner: Counter[str] = Counter()
        """Bytes of each owner."""

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, owner: str, response: dict[str, Any], items: list[Any]) -> None:
        kept = StoredResponse(owner, self._clock() + self._max_seconds, msgspec.json.encode(response), msgspec.json.encode(items))
        if kept.size > self._max_bytes:
            return
        self._stored[response["id"]] = kept
        self.num_bytes += kept.size
        self._by_owner[owner] += kept.size
        self._evict()

    def get(self, owner: str, id: str) -> StoredResponse | None:
        self._evict()
        found = self._stored.get(id)
        return found if found is not None and found.owner == owner else None

    def delete(self, owner: str, id: str) -> bool:
        if self.get(owner, id) is None:
            return False
        self._drop(id)
        return True

    def _evict(self) -> None:
        """Expired ones in the order of arrival, which is that of expiry; then the oldest of whoever holds most."""
        now = self._clock()
        while self._stored and next(iter(self._stored.values())).expires <= now:
            self._drop(next(iter(self._stored)))
        while len(self._stored) > self._max_responses or self.num_bytes > self._max_bytes:
            largest = max(self._by_owner, key=self._by_owner.__getitem__)
            self._drop(next(id for id, one in self._stored.items() if one.owner == largest))

    def _drop(self, id: str) -> None:
        gone = self._stored.pop(id)
        self.num_bytes -= gone.size
        self._by_owner[gone.owner] -= gone.size
        if not self._by_owner[gone.owner]:
            del self._by_owner[gone.owner]
