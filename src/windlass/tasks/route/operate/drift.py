"""Has the traffic left what the router was calibrated on? Counts, over the last requests, chances below the calibrated 5 % quantile."""

from __future__ import annotations

import math
from collections import deque

from windlass.core.model import Frozen

WINDOW = 300
MIN_REQUESTS = 50
EXPECTED_LOW = 0.05
SIGMAS = 4.0
"""Checked at every request, so three would raise a false alarm every few hundred."""


class Drift(Frozen):
    num_requests: int
    low_share: float
    unlike_share: float
    is_alarm: bool
    why: str = ""


class DriftWatch:
    """`low`: 5 % of held-out prompts had a lower chance (or, of a cascade, confidence)."""

    def __init__(self, low: float, expected_unlike: float = 0.005) -> None:
        self._low, self._expected_unlike = low, expected_unlike
        self._is_low: deque[bool] = deque(maxlen=WINDOW)
        self._is_unlike: deque[bool] = deque(maxlen=WINDOW)

    def add(self, chance: float, is_unlike: bool) -> None:
        self._is_low.append(chance < self._low)
        self._is_unlike.append(is_unlike)

    def standing(self) -> Drift:
        count = len(self._is_low)
        low, unlike = (sum(flags) / count if count else 0.0 for flags in (self._is_low, self._is_unlike))
        why = ""
        if count >= MIN_REQUESTS:
            if low > limit(EXPECTED_LOW, count):
                why = f"{low:.0%} of the last {count} prompts have a chance below the calibrated range (5 % were expected)"
            elif unlike > limit(self._expected_unlike, count):
                why = f"{unlike:.0%} of the last {count} prompts are unlike the data ({self._expected_unlike:.1%} were expected)"
        return Drift(num_requests=count, low_share=low, unlike_share=unlike, is_alarm=bool(why), why=why)


def limit(expected: float, count: int) -> float:
    return expected + SIGMAS * math.sqrt(expected * (1 - expected) / count) + 1 / count
