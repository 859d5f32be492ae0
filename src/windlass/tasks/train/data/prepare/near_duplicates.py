"""Finds exact and near duplicates: a hash of each document, and MinHash LSH (Broder 1997; Leskovec 3.4).

Shingles are five tokens, for chats five words. Eight bands of five rows: documents with 80 % of their shingles in common share a band
with probability 0.96, with 50 % 0.22, with 20 % 0.003. Only the first MOST documents are compared, and the report says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from windlass.tasks.train.data.order import Indices

SHINGLE, BANDS, ROWS_PER_BAND = 5, 8, 5
SHORTEST = 25
"""Shorter documents, in tokens, are not compared for near duplicates."""
MOST = 4_000_000
"""Documents to compare: 288 MB of signatures."""
_FACTORS = np.random.default_rng(20261115).integers(0, 1 << 63, BANDS * ROWS_PER_BAND, dtype=np.uint64) * np.uint64(
    2
) + np.uint64(1)
_HIGHEST = np.uint64(0xFFFFFFFFFFFFFFFF)


def text_hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def hashed_words(text: str) -> NDArray[np.uint32]:
    """Words instead of tokens, for chats without their template text."""
    return np.array([crc32(word.encode("utf-8", "surrogatepass")) for word in text.split()], np.uint32)


def signatures(hashes: Sequence[int], tokens: Sequence[NDArray[np.uint32]]) -> Indices:
    """[documents, 1 + BANDS]: hash and bands of each; bands of short documents are 0, which matches nothing."""
    made = np.zeros((len(hashes), 1 + BANDS), np.uint64)
    made[:, 0] = hashes
    long = [place for place, each in enumerate(tokens) if len(each) >= SHORTEST]
    if long:
        made[long, 1:] = _bands([tokens[place] for place in long])
    return made


def _bands(tokens: list[NDArray[np.uint32]]) -> Indices:
    lengths = np.array([len(each) for each in tokens])
    shingles = _shingles(np.concatenate(tokens).astype(np.uint64))
    begins = np.cumsum(lengths) - lengths
    # Shingles that cross into the next document are ignored.
    within = np.arange(len(shingles)) - np.repeat(begins, lengths) <= np.repeat(lengths, lengths) - SHINGLE
    least = np.empty((len(tokens), BANDS * ROWS_PER_BAND), np.uint64)
    for number, factor in enumerate(_FACTORS):
        least[:, number] = np.minimum.reduceat(np.where(within, _scrambled(shingles * factor), _HIGHEST), begins)
    bands = np.zeros((len(tokens), BANDS), np.uint64)
    for row in range(ROWS_PER_BAND):
        bands = (bands ^ least[:, row::ROWS_PER_BAND]) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(row + 1)
    return np.maximum(bands, np.uint64(1))


def _scrambled(values: Indices) -> Indices:
    """Multiplication leaves low bits weak: mix in the high ones."""
    return values ^ (values >> np.uint64(32))


def _shingles(tokens: Indices) -> Indices:
    """Hashes of SHINGLE tokens from each position; the last few have fewer."""
    hashed = np.zeros_like(tokens)
    for step in range(SHINGLE):
        shifted = np.concatenate([tokens[step:], np.zeros(step, np.uint64)])
        hashed = (hashed ^ shifted) * np.uint64(0xBF58476D1CE4E5B9)
        hashed ^= hashed >> np.uint64(29)
    return hashed


class DuplicateCounts(NamedTuple):
    exact: int
    """Documents that are equal to an earlier one."""
    near: int
    """Documents that are nearly equal to an earlier one, and not equal."""
    compared: int


def count_duplicates(signed: Indices) -> DuplicateCounts:
    """From the signatures of all documents, in order."""
    compared = min(len(signed), MOST)
    signed = signed[:compared]
    exact = _seen_before(signed[:, 0])
    near = np.zeros(compared, bool)
    for band in range(1, 1 + BANDS):
        near |= _seen_before(signed[:, band]) & (signed[:, band] != 0)
    return DuplicateCounts(int(exact.sum()), int((near & ~exact).sum()), compared)


def _seen_before(values: Indices) -> NDArray[np.bool_]:
    order = np.argsort(values, kind="stable")
    repeated = np.zeros(len(values), bool)
    repeated[order[1:]] = values[order[1:]] == values[order[:-1]]
    return repeated
