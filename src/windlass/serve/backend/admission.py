"""Who is let in: a pure decision over how much is there already. Knows no HTTP and no engine."""

from __future__ import annotations

import math

from windlass.core.model import Frozen

MIN_RETRY_SECONDS = 1
MAX_RETRY_SECONDS = 60
SOME_SECONDS = 5.0
"""A request's time while none has finished yet."""


class Load(Frozen):
    in_flight: int
    """Sequences that were let in and have not ended."""
    max_running: int
    """That the engine runs at once."""
    max_waiting: int
    seconds_each: float = SOME_SECONDS
    """That a sequence took lately, from being let in to its end."""

    @property
    def capacity(self) -> int:
        return max(self.max_running, 1) + self.max_waiting


class Verdict(Frozen):
    """Let in, or `full` (try again later), or `never` (more than there is room for at all)."""

    admitted: bool
    never: bool = False
    retry_seconds: int = 0


def admit(load: Load, asked: int) -> Verdict:
    """All of a request's sequences or none."""
    if asked > load.capacity:
        return Verdict(admitted=False, never=True)
    if load.in_flight + asked > load.capacity:
        return Verdict(admitted=False, retry_seconds=retry_seconds(load, asked))
    return Verdict(admitted=True)


def retry_seconds(load: Load, asked: int) -> int:
    """Until so many have ended that there is room: they end `max_running` at a time, each batch after `seconds_each`."""
    too_many = load.in_flight + asked - load.capacity
    rounds = too_many / max(load.max_running, 1)
    return clamped(rounds * load.seconds_each)


def clamped(seconds: float) -> int:
    return max(MIN_RETRY_SECONDS, min(MAX_RETRY_SECONDS, math.ceil(seconds)))
