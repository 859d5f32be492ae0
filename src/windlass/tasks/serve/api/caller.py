"""Who sends a request."""

from __future__ import annotations

from starlette.types import Scope

from windlass.core.model import Frozen
from windlass.core.request import ADDRESS

KEY = "windlass.key"
"""Scope key: the number of the caller's API key."""
REQUEST_ID = "windlass.request"
"""Scope key: the id under which the log has the request, and which its response names."""
MAX_OWNER_CHARACTERS = 64


class Caller(Frozen):
    """The number of the API key, 0 without keys, and the client's address."""

    key: int
    address: str

    @property
    def share(self) -> str:
        """Who shares a part of the queue: the holders of a key, else an address."""
        return str(self.key) if self.key else self.address

    def owner(self, user: str | None = None) -> str:
        """The engine is shared fairly between API keys (without keys, addresses), and each share between users, else addresses."""
        group = str(self.key) if self.key else f"{ADDRESS}{self.address}"
        return f"{group}/{(user or self.address)[:MAX_OWNER_CHARACTERS]}"


def caller_of(scope: Scope) -> Caller:
    client = scope.get("client")
    return Caller(key=scope.get(KEY, 0), address=client[0] if client else "")


def request_id(scope: Scope) -> str:
    return scope.get(REQUEST_ID, "")
