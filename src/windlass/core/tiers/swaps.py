"""Which experts change places between device and host memory, from how often each was used. Pure.

Use is counted, older counts weigh less. A swap costs two copies over the link, so it is made only where the difference is more than chance:
counts of equally likely experts differ by about the square root of their sum, and of the most and the least used of a hundred by several times that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SIGNIFICANT = 6.0
"""Standard deviations."""
KEPT = 0.8
"""Of the older counts, at every look."""


class Swap(NamedTuple):
    layer: int
    promoted: int
    """The expert that comes to the device."""
    demoted: int
    """The expert of the same layer that gives it its slot."""


def decayed(scores: Sequence[Sequence[float]], counts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Older scores with the counts since."""
    return [
        [KEPT * score + count for score, count in zip(old, new, strict=True)] for old, new in zip(scores, counts, strict=True)
    ]


def choose_swaps(scores: Sequence[Sequence[float]], on_device: Sequence[Sequence[bool]], limit: int) -> list[Swap]:
    """At most one per layer and `limit` in all, those that gain most first."""
    found: list[tuple[float, Swap]] = []
    for layer, (uses, here) in enumerate(zip(scores, on_device, strict=True)):
        away = max((expert for expert, is_here in enumerate(here) if not is_here), key=uses.__getitem__, default=None)
        least = min((expert for expert, is_here in enumerate(here) if is_here), key=uses.__getitem__, default=None)
        if away is None or least is None:
            continue
        gain = uses[away] - uses[least]
        if gain > SIGNIFICANT * max(uses[away] + uses[least], 1.0) ** 0.5:
            found.append((gain, Swap(layer, away, least)))
    found.sort(key=lambda one: (-one[0], one[1]))
    return [swap for _, swap in found[:limit]]
