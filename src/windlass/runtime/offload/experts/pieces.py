"""In which pieces the experts of a layer are computed, so that computing overlaps with loading and no more are needed at once than fit. Pure.

Always in the order of experts: results are added up in that order whatever is in memory, so they do not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence

PIECE_BYTES = 2**20
"""Bytes to wait for that are worth a computation of their own: a call costs some ten microseconds, these some hundred."""


def groups(experts: Sequence[int], num_slots: int) -> list[list[int]]:
    """Experts that are in memory at once: all if they fit; else two groups share the slots, one computes while the next is loaded."""
    size = len(experts) if len(experts) <= num_slots else max(num_slots // 2, 1)
    return [list(experts[first : first + size]) for first in range(0, len(experts), max(size, 1))]


def next_piece(start: int, is_there: Sequence[bool], expert_bytes: int, piece_bytes: int = PIECE_BYTES) -> int:
    """Where the piece that begins at `start` ends: after so many bytes that are still to come, and then before the next that is not there."""
    stop, awaited = start, 0
    while stop < len(is_there) and (is_there[stop] or awaited < piece_bytes):
        awaited += 0 if is_there[stop] else expert_bytes
        stop += 1
    return stop
