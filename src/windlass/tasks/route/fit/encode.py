"""Texts to the inputs of the linear model: n-grams weighted by how rare they are, and the prompt's shape in standard deviations.

Counts of all prompts are in memory once. A fold is a mask over them: weights by rarity and rows of length 1 are factors on either side of a
product, so no fold needs a matrix of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windlass.tasks.route.features.ngrams import NUM_FEATURES, counts_of
from windlass.tasks.route.features.shape import expanded, shapes_of
from windlass.tasks.route.features.sparse import Sparse

MIN_ROWS = 2
"""An n-gram of one row only can but help to know that row by heart."""
NO_FEATURE = -1
Mask = NDArray[np.bool_]
Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Raw:
    """Before anything was learnt: texts are read once, however many folds there are."""

    counts: Sparse
    """Columns are numbers of `features`."""
    features: NDArray[np.int32]
    """Those of several rows; the first stands for all others."""
    shapes: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.counts)


@dataclass(frozen=True, slots=True)
class Encoded:
    """All rows as an encoder sees them: `inverse x counts x rarity`, and the shape."""

    raw: Raw
    rarity: Vector
    """Inverse document frequency of every column; 0: never seen, or once only."""
    inverse: Vector
    """Of every row's length."""
    shape: Vector
    mean: NDArray[np.float64]
    deviation: NDArray[np.float64]

    @property
    def num_words(self) -> int:
        return len(self.rarity)

    def times(self, weights: Vector) -> Vector:
        """`weights`: of words, then of the shape."""
        words, shape = weights[: self.num_words], weights[self.num_words :]
        by_shape: Vector = self.shape @ shape
        return self.inverse * self.raw.counts.times(self.rarity * words) + by_shape

    def transposed_times(self, rows: Vector) -> Vector:
        words = self.rarity * self.raw.counts.transposed_times(self.inverse * rows)
        return np.concatenate([words, self.shape.T @ rows])

    def novelty(self) -> NDArray[np.float64]:
        """The share of each text's n-grams that were never seen."""
        counts = self.raw.counts
        unseen, all_of_them = (counts.times(mask.astype(np.float32)) for mask in (self.rarity == 0, self.rarity >= 0))
        return unseen / np.maximum(all_of_them, 1e-9)


def read(texts: Sequence[str]) -> Raw:
    counts = counts_of(texts)
    used = np.flatnonzero(counts.num_rows_with() >= MIN_ROWS)
    features = np.concatenate(([NO_FEATURE], used)).astype(np.int32)
    places = np.zeros(NUM_FEATURES, dtype=np.int32)
    places[used] = np.arange(1, len(features), dtype=np.int32)
    for _, entries in counts.blocks():
        counts.columns[entries] = places[counts.columns[entries]]
    return Raw(Sparse(counts.ends, counts.columns, counts.counts, len(features)), features, shapes_of(texts))


def encode(raw: Raw, is_train: Mask) -> Encoded:
    """What is learnt comes from the rows of the mask."""
    num_with, num_rows = raw.counts.num_rows_with(is_train), int(is_train.sum())
    num_with[0] = 0
    rarity = np.where(num_with >= MIN_ROWS, np.log((1 + num_rows) / (1 + num_with)) + 1, 0.0).astype(np.float32)
    lengths = np.sqrt(raw.counts.row_squares(rarity))
    inverse = np.where(lengths > 0, 1.0 / np.maximum(lengths, 1e-12), 0.0).astype(np.float32)
    mean, deviation = raw.shapes[is_train].mean(axis=0), raw.shapes[is_train].std(axis=0) + 1e-6
    return Encoded(raw, rarity, inverse, expanded(raw.shapes, mean, deviation), mean, deviation)
