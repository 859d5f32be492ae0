"""Ridge regression on n-grams and shape, by conjugate gradients: a dozen products with the rows, no matrix of features is made.

One output for each model. With one penalty for all of them the difference of two outputs is exactly the regression of the *gain*
of one model over the other, which is what a router has to predict.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windlass.route.fit.encode import Encoded

MAX_STEPS = 30
TOLERANCE = 1e-4
"""Of the squared residual; past that, predictions no longer change in the third decimal."""


@dataclass(frozen=True, slots=True)
class Linear:
    bias: NDArray[np.float64]
    words: NDArray[np.float32]
    """[outputs, features]"""
    shape: NDArray[np.float64]
    """[outputs, columns of the shape]"""

    def predict(self, encoded: Encoded) -> NDArray[np.float64]:
        """[rows, outputs]"""
        by_words = np.stack([encoded.words.times(weights) for weights in self.words], axis=1)
        return self.bias + by_words + encoded.shape @ self.shape.T


def fit_ridge(encoded: Encoded, targets: NDArray[np.float64], penalty: float) -> Linear:
    """`targets`: [rows, outputs]."""
    bias = targets.mean(axis=0)
    used = np.flatnonzero(encoded.words.num_rows_with())
    within = Encoded(encoded.words.with_columns(used), encoded.shape)
    solved = [_solve(within, column, penalty) for column in (targets - bias).T]
    words = np.zeros((len(solved), encoded.words.num_columns), dtype=np.float32)
    words[:, used] = np.stack([one[0] for one in solved])
    return Linear(bias, words, np.stack([one[1] for one in solved]))


def _solve(encoded: Encoded, target: NDArray[np.float64], penalty: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Conjugate gradients on (X'X + penalty) w = X'y (Hestenes and Stiefel, 1952)."""
    num_words = encoded.words.num_columns
    residual = _transposed(encoded, target)
    weights, direction = np.zeros_like(residual), residual.copy()
    square = first = float(residual @ residual)
    for _ in range(MAX_STEPS):
        if square <= TOLERANCE * first or square == 0.0:
            break
        product = _transposed(encoded, _times(encoded, direction)) + penalty * direction
        step = square / float(direction @ product)
        weights += step * direction
        residual -= step * product
        square, before = float(residual @ residual), square
        direction = residual + (square / before) * direction
    return weights[:num_words], weights[num_words:]


def _times(encoded: Encoded, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    num_words = encoded.words.num_columns
    return encoded.words.times(weights[:num_words]) + encoded.shape @ weights[num_words:]


def _transposed(encoded: Encoded, rows: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate([encoded.words.transposed_times(rows), encoded.shape.T @ rows])
