"""Guesses which source a prompt is of (nearest centroid) and predicts the mean scores of that source.

On tables of several tasks most of what a router can know beforehand is the task (arXiv 2505.12601; docs/log.md). Means of small
sources are pulled towards the mean of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windlass.route.features.nearest import NUM_COLUMNS, likely
from windlass.route.features.sparse import Sparse

PRIOR_ROWS = 20.0
BLOCK_ROWS = 32
MAX_SOURCES = 512


@dataclass(frozen=True, slots=True)
class Sources:
    centroids: NDArray[np.float32]
    """[sources, columns], of length 1."""
    means: NDArray[np.float64]
    """[sources, models]"""

    def predict(self, words: Sparse) -> NDArray[np.float64]:
        found = [self._block(words, first) for first in range(0, len(words), BLOCK_ROWS)]
        return np.concatenate(found) if found else np.zeros((0, self.means.shape[1]))

    def _block(self, words: Sparse, first: int) -> NDArray[np.float64]:
        block = words.rows(np.arange(first, min(first + BLOCK_ROWS, len(words)), dtype=np.int64))
        rows = block.folded(NUM_COLUMNS)
        rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
        return likely(rows @ self.centroids.T) @ self.means


def fit_sources(words: Sparse, groups: Sequence[str], scores: NDArray[np.float64]) -> Sources | None:
    """None where there is one source only, or nearly as many as prompts."""
    names, which = np.unique(np.array(groups), return_inverse=True)
    if not 2 <= len(names) <= min(MAX_SOURCES, len(groups) // 5):
        return None
    centroids = np.zeros((len(names), NUM_COLUMNS), dtype=np.float32)
    for number in range(len(names)):
        mine = words.rows(np.flatnonzero(which == number).astype(np.int64))
        is_word = mine.columns % 2 == 0
        folded = mine.columns[is_word] // 2 % NUM_COLUMNS
        centroids[number] = np.bincount(folded, weights=mine.values[is_word], minlength=NUM_COLUMNS)
    centroids /= np.maximum(np.linalg.norm(centroids, axis=1, keepdims=True), 1e-9)
    sizes = np.bincount(which, minlength=len(names)).astype(float)[:, None]
    sums = np.stack([np.bincount(which, weights=column, minlength=len(names)) for column in scores.T], axis=1)
    return Sources(centroids, (sums + PRIOR_ROWS * scores.mean(axis=0)) / (sizes + PRIOR_ROWS))
