"""Texts to the inputs of the linear model: n-grams weighted by how rare they are, and the prompt's shape in standard deviations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windlass.route.features.ngrams import counts_of
from windlass.route.features.shape import expanded, shapes_of
from windlass.route.features.sparse import Sparse

MIN_ROWS = 2
"""An n-gram of one row only can but help to know that row by heart."""


@dataclass(frozen=True, slots=True)
class Raw:
    """Before anything was learnt: texts are read once, however many folds there are."""

    counts: Sparse
    shapes: NDArray[np.float64]

    def rows(self, numbers: NDArray[np.int64]) -> Raw:
        return Raw(self.counts.rows(numbers), self.shapes[numbers])


@dataclass(frozen=True, slots=True)
class Encoded:
    words: Sparse
    shape: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.words)

    def rows(self, numbers: NDArray[np.int64]) -> Encoded:
        return Encoded(self.words.rows(numbers), self.shape[numbers])


@dataclass(frozen=True, slots=True)
class Encoder:
    rarity: NDArray[np.float32]
    """Inverse document frequency of every feature; 0: never seen, or once only."""
    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]

    def encode(self, raw: Raw) -> Encoded:
        shape = expanded(raw.shapes, self.mean, self.deviation)
        return Encoded(raw.counts.scaled(self.rarity), shape)

    def novelty(self, raw: Raw) -> NDArray[np.float64]:
        """The share of a text's n-grams that were never seen."""
        counts = raw.counts
        unseen = counts.row_sums(counts.values * (self.rarity[counts.columns] == 0))
        return unseen / np.maximum(counts.row_sums(counts.values), 1e-9)


def read(texts: Sequence[str]) -> Raw:
    return Raw(counts_of(texts), shapes_of(texts))


def learn(raw: Raw) -> Encoder:
    num_with = raw.counts.num_rows_with()
    rarity = np.where(num_with >= MIN_ROWS, np.log((1 + len(raw.counts)) / (1 + num_with)) + 1, 0.0)
    return Encoder(rarity.astype(np.float32), raw.shapes.mean(axis=0), raw.shapes.std(axis=0) + 1e-6)
