"""When requests arrive: a Poisson process, the same for the same seed. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice, takewhile


def poisson(rate: float, seed: str) -> Iterator[float]:
    """Seconds from the start, without end: the gaps are independent and exponential with mean 1 / rate."""
    chance, now = random.Random(seed), 0.0
    while True:
        now += chance.expovariate(rate)
        yield now


def schedule(rate: float, seed: str, requests: int | None, seconds: float | None) -> Iterator[float]:
    """The first so many arrivals, or all within so many seconds."""
    found = poisson(rate, seed)
    if requests is not None:
        return islice(found, requests)
    assert seconds is not None
    return takewhile(lambda arrival: arrival <= seconds, found)
