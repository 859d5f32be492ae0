"""One number decides how cheap a router is: the *tolerance*, how much lower a model's chance of being right may be.

0 takes the model with the best chance. Above, the cheapest one whose chance is within the tolerance of the best. Below, the best
single model is preferred unless another is better by so much; -1 takes it always. Of two models this is a threshold on the gain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ALWAYS_BEST, ALWAYS_CHEAPEST = -1.0, 1.0
NUM_POINTS = 100
BLOCK_POINTS = 16


def choose(chances: NDArray[np.float64], best: int, tolerance: float) -> NDArray[np.int64]:
    """[rows, models] -> the column of each row's model. Columns are ordered cheapest first; `best` is the best single model."""
    if tolerance <= ALWAYS_BEST:
        return np.full(len(chances), best)
    favoured = chances
    if tolerance < 0:
        favoured = chances.copy()
        favoured[:, best] -= tolerance
    behind = favoured.max(axis=1, keepdims=True) - favoured
    return np.argmax(behind <= max(tolerance, 0.0), axis=1)


def tolerances(chances: NDArray[np.float64], best: int) -> NDArray[np.float64]:
    """From the best model always to the cheapest always, in steps that move about as many prompts each."""
    gaps = np.delete(chances[:, [best]] - chances, best, axis=1).ravel()
    steps = np.quantile(gaps, np.linspace(0.0, 1.0, NUM_POINTS)) if gaps.size else np.zeros(0)
    inner = np.unique(np.clip(np.concatenate((steps, -steps, [0.0])), ALWAYS_BEST, ALWAYS_CHEAPEST))
    return np.concatenate(([ALWAYS_BEST], inner[(inner > ALWAYS_BEST) & (inner < ALWAYS_CHEAPEST)], [ALWAYS_CHEAPEST]))


@dataclass(frozen=True, slots=True)
class Path:
    """What every tolerance would have chosen."""

    tolerances: NDArray[np.float64]
    choices: NDArray[np.uint8]
    """[rows, tolerances]"""

    def blocks(self) -> Iterator[slice]:
        """Of tolerances, so that values of all rows and all tolerances are never in memory together."""
        for first in range(0, len(self.tolerances), BLOCK_POINTS):
            yield slice(first, min(first + BLOCK_POINTS, len(self.tolerances)))

    def taken(self, values: NDArray[np.float64], points: slice) -> NDArray[np.float32]:
        """The chosen models' values: [rows, points]."""
        choices = self.choices[:, points]
        found = np.zeros(choices.shape, dtype=np.float32)
        for model in range(values.shape[1]):  # no index array of 8 bytes an entry
            np.copyto(found, values[:, [model]].astype(np.float32), where=choices == model)
        return found

    def means(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of the values that are known, for every tolerance; NaN where none is."""
        found = np.full(len(self.tolerances), np.nan)
        for points in self.blocks():
            taken = self.taken(values, points)
            known = ~np.isnan(taken)
            sums, counts = np.where(known, taken, 0.0).sum(axis=0, dtype=np.float64), known.sum(axis=0)
            np.divide(sums, counts, out=found[points], where=counts > 0)
        return found


def walk(chances: NDArray[np.float64], best: int) -> Path:
    steps = tolerances(chances, best)
    chosen = np.empty((len(chances), len(steps)), dtype=np.uint8)
    for place, step in enumerate(steps):
        chosen[:, place] = choose(chances, best, float(step))
    return Path(steps, chosen)
