"""Assigns consecutive layers to pipeline stages: minimizes the time of the slowest stage within each stage's memory."""

from __future__ import annotations

from collections.abc import Sequence

from windlass.core.place import Interval, stages_of


def balance(
    layer_bytes: Sequence[float], speeds: Sequence[float], rooms: Sequence[float], first: float = 0.0, last: float = 0.0
) -> tuple[Interval, ...]:
    """Stages for `len(speeds)` pipeline ranks, by bisection on the time of the slowest one.

    A stage's time is its bytes over its speed (decode reads every weight it holds); `rooms` are the bytes it may hold; `first` and
    `last` are the bytes of the embedding and the head. Falls back to a split by memory if nothing fits: the caller sees the overflow.
    """
    count = len(speeds)
    if count == 1:
        return ((0, len(layer_bytes)),)
    extras = [first] + [0.0] * (count - 2) + [last]
    high = (sum(layer_bytes) + first + last) / min(speeds)
    best = _fill(layer_bytes, speeds, rooms, extras, high)
    if best is None:
        return stages_of(len(layer_bytes), count, [max(room, 1.0) for room in rooms])
    low = 0.0
    for _ in range(40):
        middle = (low + high) / 2
        found = _fill(layer_bytes, speeds, rooms, extras, middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    return best


def _fill(
    layer_bytes: Sequence[float], speeds: Sequence[float], rooms: Sequence[float], extras: Sequence[float], seconds: float
) -> tuple[Interval, ...] | None:
    """Fills stage after stage up to `seconds` and its memory, leaving at least one layer for each later stage."""
    bounds: list[Interval] = []
    start, total = 0, len(layer_bytes)
    for stage, (speed, room, extra) in enumerate(zip(speeds, rooms, extras, strict=True)):
        limit = min(seconds * speed, room) - extra
        latest = total - (len(speeds) - stage - 1)
        stop, held = start, 0.0
        while stop < latest and held + layer_bytes[stop] <= limit:
            held += layer_bytes[stop]
            stop += 1
        if stop == start:
            return None
        bounds.append((start, stop))
        start = stop
    return tuple(bounds) if start == total else None
