"""Which models a server of several holds in memory: pure decisions. Knows no engine and no clock."""

from __future__ import annotations

from collections.abc import Sequence

from windlass.core.model import Frozen

LEAST_TURN_SECONDS = 2.0
TURN_PER_LOAD = 4.0
"""A busy model is not unloaded before it has served so many times as long as loading takes: swaps cost at most a fifth of the time."""


class MemoryRoom(Frozen):
    """How much may be loaded at a time; None: no limit of this kind."""

    max_models: int | None = None
    max_bytes: int | None = None


class LoadedModel(Frozen):
    """A model in memory, or about to be."""

    name: str
    num_bytes: int
    in_use: int
    """Requests that hold it."""
    last_used: float
    turn_ends: float
    """Until then a busy model is not unloaded for another."""


def fits(loaded: Sequence[LoadedModel], num_bytes: int, room: MemoryRoom) -> bool:
    """Whether one more model of so many bytes fits. Alone it always may be tried: the engine refuses what is too large."""
    if not loaded:
        return True
    if room.max_models is not None and len(loaded) >= room.max_models:
        return False
    return room.max_bytes is None or sum(model.num_bytes for model in loaded) + num_bytes <= room.max_bytes


def to_unload(loaded: Sequence[LoadedModel], num_bytes: int, room: MemoryRoom) -> tuple[str, ...]:
    """The fewest models that make room for another: idle ones first, then whoever has waited longest for a request."""
    order = sorted(loaded, key=lambda model: (model.in_use > 0, model.last_used, model.name))
    gone: list[str] = []
    for model in order:
        if fits([other for other in loaded if other.name not in gone], num_bytes, room):
            break
        gone.append(model.name)
    return tuple(gone)


def turn_seconds(load_seconds: float) -> float:
    return max(LEAST_TURN_SECONDS, TURN_PER_LOAD * load_seconds)


def may_end(model: LoadedModel, now: float) -> bool:
    """Whether it may be told to finish what runs and take nothing new."""
    return not model.in_use or now >= model.turn_ends


def idle_for(model: LoadedModel, now: float, seconds: float | None) -> bool:
    return seconds is not None and not model.in_use and now - model.last_used >= seconds
