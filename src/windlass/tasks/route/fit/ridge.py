"""Ridge regression on n-grams and shape, by conjugate gradients: a few dozen products with the rows, no matrix of features is made.

One output for each model. With one penalty for all of them the difference of two outputs is exactly the regression of the *gain*
of one model over the other, which is what a router has to predict. Several penalties cost the products of one: all of them search the
same Krylov space (Jegerlehner, Krylov space solvers for shifted linear systems, hep-lat/9612014).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windlass.tasks.route.fit.encode import Encoded, Mask, Vector

MAX_STEPS = 30
TOLERANCE = 1e-4
"""Of the squared residual; past that, predictions no longer change in the third decimal."""


@dataclass(frozen=True, slots=True)
class Linear:
    bias: NDArray[np.float64]
    weights: Vector
    """[outputs, words and then the columns of the shape]"""

    def predict(self, encoded: Encoded) -> NDArray[np.float64]:
        """[rows, outputs]"""
        return self.bias + np.stack([encoded.times(one) for one in self.weights], axis=1)


def fit_ridge(encoded: Encoded, is_train: Mask, targets: NDArray[np.float64], penalties: Sequence[float]) -> list[Linear]:
    """`targets`: [rows, outputs], of which those of the mask count. One regression for each penalty."""
    bias = targets[is_train].mean(axis=0)
    size = encoded.num_words + encoded.shape.shape[1]
    found = np.zeros((len(penalties), targets.shape[1], size), dtype=np.float32)
    for number, column in enumerate((targets - bias).T):
        target = np.where(is_train, column, 0.0).astype(np.float32)
        _solve(encoded, is_train, target, penalties, found[:, number])
    return [Linear(bias, weights) for weights in found]


@dataclass(slots=True)
class _Shifted:
    """The system with a larger penalty. Its residual is `scale` times that of the first."""

    shift: float
    weights: Vector
    direction: Vector
    scale: float = 1.0
    before: float = 1.0
    """The scale of the last step."""
    step: float = 0.0

    def move(self, step: float, last_step: float, turn: float) -> None:
        lower = step * turn * (self.before - self.scale) + self.before * last_step * (1 + self.shift * step)
        after = self.scale * self.before * last_step / lower
        self.step = step * after / self.scale
        self.weights += np.float32(self.step) * self.direction
        self.before, self.scale = self.scale, after

    def turn(self, residual: Vector, step: float, turn: float) -> None:
        self.direction *= np.float32(turn * self.scale * self.step / (self.before * step))
        self.direction += np.float32(self.scale) * residual


def _solve(encoded: Encoded, is_train: Mask, target: Vector, penalties: Sequence[float], out: Iterable[Vector]) -> None:
    """Conjugate gradients on (X'X + penalty) w = X'y (Hestenes and Stiefel, 1952), from the smallest penalty. `out`: zeros."""
    residual, least = encoded.transposed_times(target), min(penalties)
    every = [_Shifted(penalty - least, weights, residual.copy()) for penalty, weights in zip(penalties, out, strict=True)]
    first = every[penalties.index(least)]
    square = start = float(residual @ residual)
    step, turn = 1.0, 0.0
    for _ in range(MAX_STEPS):
        if square <= TOLERANCE * start or square == 0.0:
            break
        product = _product(encoded, is_train, first.direction, least)
        last_step, step = step, square / float(first.direction @ product)
        for one in every:
            one.move(step, last_step, turn)
        product *= np.float32(step)
        residual -= product
        square, before = float(residual @ residual), square
        turn = square / before
        for one in every:
            one.turn(residual, step, turn)


def _product(encoded: Encoded, is_train: Mask, weights: Vector, penalty: float) -> Vector:
    found = encoded.transposed_times(np.where(is_train, encoded.times(weights), np.float32(0.0)))
    found += np.float32(penalty) * weights
    return found
