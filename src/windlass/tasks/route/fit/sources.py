"""Guesses which source a prompt is of (nearest centroid) and predicts the mean scores of that source.

On tables of several tasks most of what a router can know beforehand is the task (arXiv 2505.12601; docs/log.md). Means of small
sources are pulled towards the mean of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windlass.tasks.route.features.nearest import NUM_COLUMNS, likely
from windlass.tasks.route.features.sparse import TERM
from windlass.tasks.route.fit.encode import Encoded, Mask, Vector

PRIOR_ROWS = 20.0
BLOCK_ROWS = 64
MAX_SOURCES = 512


@dataclass(frozen=True, slots=True)
class Sources:
    centroids: Vector
    """[columns, sources], of length 1."""
    means: NDArray[np.float64]
    """[sources, models]"""

    def predict(self, encoded: Encoded, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """Of some rows."""
        found = [self._block(encoded, numbers[first : first + BLOCK_ROWS]) for first in range(0, len(numbers), BLOCK_ROWS)]
        return np.concatenate(found) if found else np.zeros((0, self.means.shape[1]))

    def _block(self, encoded: Encoded, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        words = _words(encoded, numbers)
        cosines = np.zeros((len(numbers), len(self.means)), dtype=np.float32)
        for row in range(len(numbers)):
            mine = slice(words.ends[row], words.ends[row + 1])
            values = words.values[mine]
            values /= max(float(np.sqrt(values @ values)), 1e-12)
            cosines[row] = values @ self.centroids[words.columns[mine]]
        return likely(cosines) @ self.means


@dataclass(frozen=True, slots=True)
class _Words:
    ends: NDArray[np.int64]
    columns: NDArray[np.int32]
    values: Vector


def _words(encoded: Encoded, numbers: NDArray[np.int64]) -> _Words:
    """Of some rows: words alone (no pairs), weighted by rarity, folded into fewer columns."""
    some = encoded.raw.counts.rows(numbers)
    features, rarity = encoded.raw.features[some.columns], encoded.rarity[some.columns]
    kept = (features % 2 == 0) & (rarity > 0)
    ends = np.concatenate(([0], np.cumsum(kept)))[some.ends]
    values = TERM[some.counts[kept]] * rarity[kept] * np.repeat(encoded.inverse[numbers], np.diff(ends))
    return _Words(ends, features[kept] // 2 % NUM_COLUMNS, values)


def fit_sources(encoded: Encoded, is_train: Mask, groups: Sequence[str], scores: NDArray[np.float64]) -> Sources | None:
    """From the rows of the mask. None where there is one source only, or nearly as many as prompts."""
    trained = np.flatnonzero(is_train)
    inside_groups = [groups[place] for place in trained.tolist()]
    names = sorted(set(inside_groups))
    if not 2 <= len(names) <= min(MAX_SOURCES, len(trained) // 5):
        return None
    numbers = {name: number for number, name in enumerate(names)}
    which = np.array([numbers[group] for group in inside_groups])
    sizes, inside = np.bincount(which, minlength=len(names)).astype(float)[:, None], scores[trained]
    sums = np.stack([np.bincount(which, weights=column, minlength=len(names)) for column in inside.T], axis=1)
    means = (sums + PRIOR_ROWS * inside.mean(axis=0)) / (sizes + PRIOR_ROWS)
    return Sources(_centroids(encoded, [trained[which == number] for number in range(len(names))]), means)


def _centroids(encoded: Encoded, rows_of: Sequence[NDArray[np.int64]]) -> Vector:
    found = np.zeros((NUM_COLUMNS, len(rows_of)), dtype=np.float32)
    for number, mine in enumerate(rows_of):
        for first in range(0, len(mine), BLOCK_ROWS):
            words = _words(encoded, mine[first : first + BLOCK_ROWS])
            found[:, number] += np.bincount(words.columns, weights=words.values, minlength=NUM_COLUMNS)
    found /= np.maximum(np.sqrt(np.einsum("ij,ij->j", found, found)), 1e-9)
    return found
