"""Hashed words and pairs of words of a text: no vocabulary to keep, any language, the same number in every process."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from zlib import crc32

import numpy as np

from windlass.tasks.route.features.sparse import MAX_COUNT, Sparse
from windlass.tasks.route.features.text import looked_at

BITS = 18
NUM_FEATURES = 1 << BITS
_WORDS = NUM_FEATURES - 2
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_TOKEN = re.compile(rf"[{_UNSPACED}]|[^\W\d_{_UNSPACED}]+|\d|[^\w\s]")
"""A word, a character of a script without spaces, one digit, or one sign."""


def counted(text: str) -> dict[int, int]:
    """Feature -> how often. Words have even numbers, pairs of words odd ones."""
    found: dict[int, int] = {}
    last = b""
    for token in _TOKEN.findall(looked_at(text).lower()):
        word = token.encode("utf-8", "surrogatepass")
        feature = crc32(word) & _WORDS
        found[feature] = found.get(feature, 0) + 1
        if last:
            feature = crc32(b"%b %b" % (last, word)) & _WORDS | 1
            found[feature] = found.get(feature, 0) + 1
        last = word
    return found


def counts_of(texts: Sequence[str]) -> Sparse:
    ends, features, counts = [0], array("i"), bytearray()
    for text in texts:
        found = counted(text)
        features.extend(found.keys())
        counts.extend(min(count, MAX_COUNT) for count in found.values())
        ends.append(len(features))
    ends = np.array(ends, dtype=np.int64)
    return Sparse(ends, np.frombuffer(features, np.int32), np.frombuffer(counts, np.uint8), NUM_FEATURES)  # no copies
