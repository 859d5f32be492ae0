"""The order of samples, computed and not stored: sample n is found directly, and every process finds the same.

Samples of a source are shuffled by a keyed permutation (a Feistel network with cycle walking; Black and Rogaway 2002).
Sources are interleaved by a Weyl sequence: golden-ratio steps keep every stretch close to the requested proportions.
"""

from __future__ import annotations

from hashlib import blake2b
from math import gcd

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6
"""Four make a Feistel network a strong permutation when its rounds are random functions (Luby and Rackoff 1988); ours are only good hashes."""
GOLDEN = 0.6180339887498949
STRIDES_TRIED = 32
Indices = NDArray[np.uint64]


def key(*parts: int | str) -> int:
    """A 64-bit hash of the parts."""
    return int.from_bytes(blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest(), "little")


def _mix(values: Indices) -> Indices:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): every bit depends on every bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def permute(places: Indices, size: int, secret: int) -> Indices:
    """Applies the permutation `secret` of range(size)."""
    if size == 1:
        return np.zeros_like(places)
    half = max((size - 1).bit_length() + 1, 2) // 2
    keys = _mix(np.uint64(secret) + np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    found = _feistel(places, half, keys)
    while len(outside := np.nonzero(found >= size)[0]):
        found[outside] = _feistel(found[outside], half, keys)
    return found


def _feistel(values: Indices, half: int, keys: Indices) -> Indices:
    bits, low = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & low
    for secret in keys:
        left, right = right, left ^ (_mix(right + secret) & low)
    return (left << bits) | right


class Interleaving:
    """Interleaves sources: in every period, each is drawn exactly `quota` times."""

    def __init__(self, quotas: list[int]) -> None:
        self.quotas = quotas
        self.period = sum(quotas)
        self._edges = np.cumsum([0, *quotas])
        self._stride = _even_stride(self.period)

    def draws(self, first: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For samples first, first + 1, ...: the source, and the index of the draw from it."""
        sources, numbers = np.empty(count, np.int64), np.empty(count, np.int64)
        done = 0
        while done < count:
            epoch, place = divmod(first + done, self.period)
            part = slice(done, done + min(count - done, self.period - place))
            sources[part], numbers[part] = self._within(epoch, place, part.stop - part.start)
            done = part.stop
        return sources, numbers

    def _within(self, epoch: int, place: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        steps = np.arange(count, dtype=np.int64) * self._stride  # below 2^63: periods of 2^40 samples in batches of 2^20
        residues = (steps + place * self._stride % self.period) % self.period
        sources = np.searchsorted(self._edges, residues, side="right") - 1
        numbers = np.empty(count, np.int64)
        for source, quota in enumerate(self.quotas):
            chosen = sources == source
            before = self._before(int(self._edges[source + 1]), place) - self._before(int(self._edges[source]), place)
            numbers[chosen] = epoch * quota + before + np.arange(np.count_nonzero(chosen))
        return sources, numbers

    def _before(self, edge: int, place: int) -> int:
        """How many of the first `place` residues of a period lie below `edge`."""
        if edge in (0, self.period):
            return place if edge else 0
        below = _floor_sum(place, self.period, self._stride, self.period - edge)
        return _floor_sum(place, self.period, self._stride, 0) - below + place


def _even_stride(period: int) -> int:
    """Of the strides near the golden ratio that are coprime to the period, the most even one.

    The deviation of a stretch from its quota is bounded by the sum of the partial quotients of stride / period (Niederreiter 1992, 3.2).
    """
    middle = max(round(period * GOLDEN), 1)
    around = range(max(middle - STRIDES_TRIED, 1), middle + STRIDES_TRIED)
    return min((stride for stride in around if gcd(stride, period) == 1), key=lambda stride: _sum_of_quotients(stride, period))


def _sum_of_quotients(stride: int, period: int) -> int:
    total = 0
    while stride:
        total += period // stride
        period, stride = stride, period % stride
    return total


def _floor_sum(count: int, divisor: int, slope: int, offset: int) -> int:
    """The sum of (slope * i + offset) // divisor for i below count, by a Euclid-like algorithm (Graham, Knuth, Patashnik, 3.5)."""
    total = 0
    while True:
        total += count * (count - 1) // 2 * (slope // divisor) + count * (offset // divisor)
        slope, offset = slope % divisor, offset % divisor
        highest = slope * count + offset
        if highest < divisor:
            return total
        count, offset = divmod(highest, divisor)
        slope, divisor = divisor, slope


def quotas_of(sizes: list[int], weights: list[float] | None) -> list[int]:
    """Samples per epoch of each source, by the largest-remainder method."""
    if weights is None:
        return sizes
    total = sum(sizes)
    exact = [total * weight / sum(weights) for weight in weights]
    quotas = [max(int(share), 1) for share in exact]  # every source is drawn at least once
    by_remainder = sorted(range(len(sizes)), key=lambda source: quotas[source] - exact[source])
    for step in range(max(total - sum(quotas), 0)):
        quotas[by_remainder[step % len(sizes)]] += 1
    return quotas
