"""All that a server is told. Values only; what follows from them is decided in the modules that use them."""

from __future__ import annotations

import math

from windlass.core.model import Frozen
from windlass.core.request import Sampling
from windlass.errors import BadInput
from windlass.units import MIB

MAX_KEY_CHARACTERS = 4096


class Settings(Frozen):
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    """Any of them opens every route; none: no key is asked for."""
    model: str = ""
    """The name that clients ask for; empty: what the engine calls its model."""
    max_waiting: int = 64
    """Sequences that may wait besides those that run; more are refused with 429."""
    max_body_bytes: int = 8 * MIB
    max_bodies_bytes: int = 64 * MIB
    """Of all bodies that are being read at a time; one of `max_body_bytes` is always taken."""
    max_n: int = 16
    """Answers to one prompt."""
    max_batch: int = 64
    """Sequences of one request: prompts times answers."""
    deadline_seconds: float = 600.0
    """Of a request that names none; also the longest that one may name. What OpenAI's own clients wait."""
    head_seconds: float = 20.0
    """For a connection to send a request's headers, and again for its body."""
    drain_seconds: float = 30.0
    """For what runs to finish when the server is asked to end."""
    stuck_seconds: float = 120.0
    """An engine that says nothing for so long is taken to be stuck and started anew."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which the server may be addressed, besides its own."""
    cors_origins: tuple[str, ...] = ()
    """Other sites whose pages may ask; none by default."""
    sampling: Sampling = Sampling()
    """Of requests that say nothing about it."""
    log_requests: bool = True
    log_prompts: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise BadInput(f"port {self.port}; it should be between 0 (any that is free) and 65535")
        for name in ("max_body_bytes", "max_bodies_bytes", "max_n", "max_batch"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is {getattr(self, name)}; it should be at least 1")
        if self.max_waiting < 0:
            raise BadInput(f"max_waiting is {self.max_waiting}; it should be at least 0")
        for name in ("deadline_seconds", "head_seconds", "stuck_seconds"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise BadInput(f"{name} is {getattr(self, name):g}; it should be more than 0, and have an end")
        if not (math.isfinite(self.drain_seconds) and self.drain_seconds >= 0):
            raise BadInput(f"drain_seconds is {self.drain_seconds:g}; it should be at least 0, and have an end")
        for key in self.api_keys:
            check_key(key)


def check_key(key: str) -> None:
    """It has to go through a header: visible ASCII. The message must not repeat it."""
    if not key or len(key) > MAX_KEY_CHARACTERS or not all("!" <= character <= "~" for character in key):
        raise BadInput(f"an API key is 1 to {MAX_KEY_CHARACTERS} visible ASCII characters without spaces; this one is not")
