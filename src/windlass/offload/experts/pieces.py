"""In which pieces the experts of a layer are computed, so that computing overlaps with loading and no more are needed at once than fit. Pure.

Always in the order of experts: results are added up in that order whatever is in memory, so they do not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence

PIECE_BYTES = 4 * 2**20
"""Bytes to load that are worth a computation of their own: a call costs some ten microseconds, these a millisecond."""


def groups(experts: Sequence[int], num_slots: int) -> list[list[int]]:
    """Experts that are in memory at once: all if they fit; else two groups share the slots, one computes while the next is loaded."""
    size = len(experts) if len(experts) <= num_slots else max(num_slots // 2, 1)
    return [list(experts[first : first + size]) for first in range(0, len(experts), max(size, 1))]


def pieces(missing: Sequence[bool], expert_bytes: int, piece_bytes: int = PIECE_BYTES) -> list[tuple[int, int]]:
    """Intervals of a group: each ends when enough was missing in it."""
    found: list[tuple[int, int]] = []
    start = loaded = 0
    for index, is_missing in enumerate(missing):
        loaded += expert_bytes if is_missing else 0
        if loaded >= piece_bytes:
            found.append((start, index + 1))
            start, loaded = index + 1, 0
    return found + ([(start, len(missing))] if start < len(missing) else [])
