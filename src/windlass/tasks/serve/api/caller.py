"""Who sends a request."""

from __future__ import annotations

from starlette.types import Scope

from windlass.core.model import Frozen

KEY = "windlass.key"
"""Scope key: the number of the caller's API key."""


class Caller(Frozen):
    """The number of the API key, 0 without keys, and the client's address."""

    key: int
    address: str

    @property
    def share(self) -> str:
        """Who shares a part of the queue: the holders of a key, else an address."""
        return str(self.key) if self.key else self.address


def caller_of(scope: Scope) -> Caller:
    client = scope.get("client")
    return Caller(key=scope.get(KEY, 0), address=client[0] if client else "")
