"""Error statistics of a quantized block of rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True)
class Statistics:
    squared_error: float = 0.0
    squared_weight: float = 0.0
    worst_squared: float = 0.0
    """Of the worst group: squared error over squared weight."""
    worst_group: int = -1
    """Its number, counting groups row by row; -1 where every group is exact."""
    num_unusable: int = 0
    """NaN, Inf, or beyond 2^126 in magnitude. Their groups were coded as zeros, so a caller must stop when it is not 0."""

    @property
    def relative_rms(self) -> float:
        return sqrt(self.squared_error / self.squared_weight) if self.squared_weight > 0 else 0.0

    @property
    def worst_rms(self) -> float:
        return sqrt(self.worst_squared)


def total(blocks: Iterable[tuple[int, Statistics]]) -> Statistics:
    """Of blocks in order, each with the number of its first group."""
    whole = Statistics()
    for first_group, block in blocks:
        worse = block.worst_squared > whole.worst_squared
        whole = Statistics(
            whole.squared_error + block.squared_error,
            whole.squared_weight + block.squared_weight,
            block.worst_squared if worse else whole.worst_squared,
            first_group + block.worst_group if worse else whole.worst_group,
            whole.num_unusable + block.num_unusable,
        )
    return whole
