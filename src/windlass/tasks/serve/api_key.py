"""An API key: its name, what it may do, and until when. Values only."""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Literal

from windlass.core.model import Frozen
from windlass.core.request import PRIORITIES
from windlass.errors import BadInput

MAX_KEY_CHARACTERS = 4096
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_HASH = re.compile(r"[0-9a-f]{64}")
_OF_NOTHING = hashlib.sha256(b"").hexdigest()


def check_secret(key: str) -> None:
    """Keys travel in a header: visible ASCII only. The message must not reveal the key."""
    if not key or len(key) > MAX_KEY_CHARACTERS or not all("!" <= character <= "~" for character in key):
        raise BadInput(f"invalid API key: a key has 1 to {MAX_KEY_CHARACTERS} visible ASCII characters and no spaces")


class ApiKey(Frozen, dict=True):
    """Exactly one of `key` and `sha256`."""

    name: str
    key: str = ""
    sha256: str = ""
    """Of the key, in hexadecimal, so that a file need not contain the key itself."""
    role: Literal["user", "admin"] = "user"
    """Only an admin may read metrics and the state of the server."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    """Of prompt and output together."""
    priority: int = 0
    """The most urgent that its requests can have; lower is more urgent."""
    expires: datetime | None = None
    """The first moment at which it is no longer valid; in UTC unless it says otherwise."""

    def __post_init__(self) -> None:
        if _NAME.fullmatch(self.name) is None:
            raise BadInput("the name of an API key has 1 to 64 letters, digits, or . _ @ -")
        if bool(self.key) == bool(self.sha256):
            raise BadInput(f"API key {self.name}: give either key or sha256")
        if self.key:
            check_secret(self.key)
        elif _HASH.fullmatch(self.sha256) is None:
            raise BadInput(f"API key {self.name}: sha256 should have 64 hexadecimal digits in lower case")
        elif self.sha256 == _OF_NOTHING:  # which a request without a key would match
            raise BadInput(f"API key {self.name}: sha256 is that of an empty text; give that of a key")
        for field in ("requests_per_minute", "tokens_per_minute", "tokens_per_day"):
            if (limit := getattr(self, field)) is not None and limit < 1:
                raise BadInput(f"API key {self.name}: {field} is {limit}; it should be at least 1")
        if not PRIORITIES[0] <= self.priority <= PRIORITIES[1]:
            raise BadInput(
                f"API key {self.name}: priority is {self.priority}; it should be between {PRIORITIES[0]} and {PRIORITIES[1]}"
            )

    @cached_property
    def digest(self) -> bytes:
        return bytes.fromhex(self.sha256) if self.sha256 else hashlib.sha256(self.key.encode()).digest()

    @property
    def is_limited(self) -> bool:
        return not (self.requests_per_minute is None and self.tokens_per_minute is None and self.tokens_per_day is None)

    def is_expired(self, now: datetime) -> bool:
        if self.expires is None:
            return False
        return now >= (self.expires if self.expires.tzinfo is not None else self.expires.replace(tzinfo=UTC))


def named_keys(keys: tuple[Any, ...]) -> tuple[ApiKey, ...]:
    """Plain keys, which may do everything, are named by a digest: a name owns files and batches, so it must stay with its key when
    others are added or removed."""
    named = tuple(key if isinstance(key, ApiKey) else ApiKey(name=_plain_name(key), key=key, role="admin") for key in keys)
    names: dict[bytes, str] = {}
    for key in named:
        if key.digest in names:
            raise BadInput(f"the API keys {names[key.digest]} and {key.name} are the same key; give each its own key")
        names[key.digest] = key.name
    return named


def _plain_name(key: str) -> str:
    return f"key-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
