"""Where in a ring of memory each streamed matrix lies, and when its place is free. Pure.

Addresses are fixed, so that a recorded step can use them: every matrix has its place, and places of matrices that are used at different times
overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RingLayout:
    offsets: tuple[int, ...]
    waits_for: tuple[int, ...]
    """How many uses back the last matrix was that lies in the same place: it must have been given back."""


def ring_layout(sizes: Sequence[int], ring_bytes: int) -> RingLayout:
    """One after another in the order of use; from the start again where the end is too short."""
    offsets: list[int] = []
    position = 0
    for size in sizes:
        if position + size > ring_bytes:
            position = 0
        assert size <= ring_bytes, "a ring holds its largest matrix"
        offsets.append(position)
        position += size
    count = len(sizes)
    return RingLayout(tuple(offsets), tuple(_last_overlap(index, sizes, offsets) for index in range(count)))


def _last_overlap(index: int, sizes: Sequence[int], offsets: Sequence[int]) -> int:
    count, start, stop = len(sizes), offsets[index], offsets[index] + sizes[index]
    for back in range(1, count):
        other = (index - back) % count
        if offsets[other] < stop and start < offsets[other] + sizes[other]:
            return back
    return count
