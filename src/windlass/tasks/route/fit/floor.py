"""The cheapest tolerance that keeps quality at or above a floor, relative to the best single model, with a stated confidence.

Tolerances are tried in a fixed order, from the best model always towards the cheapest (and from the best chance of each prompt, where
that is better than any one model), and the first that cannot be shown to hold ends
the walk (fixed-sequence testing, as in Learn then Test, arXiv 2110.01052): no correction for the number tried is needed. Each is tested
on held-out answers by a lower bound of the mean of `score - floor x score of the best model`. The bound is a *prediction* bound for as
many future prompts as there are held-out ones, so that a check on a finite set of new prompts holds as often as promised; it is the lower
end of a two-sided interval, because a bound that is right on average is missed too often in half of all tables; and one prompt that
went as badly as it can is added to the data, as conformal risk control does (arXiv 2208.02814).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from windlass.core.model import Frozen
from windlass.tasks.route.decide.path import Path

NUM_SPLITS = 200
BLOCK_SPLITS = 25
ROUNDING = 1e-6
"""Scores along a path are kept in 32 bits."""
Weights = NDArray[np.float32]


class FloorCheck(Frozen):
    """Calibrated on one random half of the held-out answers, checked on the other, many times."""

    num_splits: int
    num_missed: int
    mean_share_of_best: float
    """Of calls that went to the best single model."""
    mean_cheap_share: float
    worst_ratio: float


@dataclass(frozen=True, slots=True)
class Margins:
    """`score - floor x score of the best model` along a path."""

    path: Path
    scores: NDArray[np.float64]
    best: int
    floor: float

    @property
    def argmax(self) -> int:
        """The number of the tolerance 0."""
        return int(np.argmin(np.abs(self.path.tolerances)))

    def lower_bounds(self, weights: Weights, confidence: float) -> NDArray[np.float64]:
        """[splits, tolerances]. `weights`: [splits, rows], 1 for rows that count."""
        counts = weights.sum(axis=1, keepdims=True, dtype=np.float64) + 1.0
        sums = np.zeros((len(weights), len(self.path.tolerances)))
        squares = np.zeros_like(sums)
        asked = np.float32(self.floor) * self.scores[:, [self.best]].astype(np.float32)
        for points in self.path.blocks():
            values = self.path.taken(self.scores, points) - asked
            sums[:, points], squares[:, points] = weights @ values, weights @ (values * values)
        means = (sums - self.floor) / counts
        squares = (squares + self.floor**2) / counts
        deviations = np.sqrt(np.maximum(squares - means**2, 0.0) * counts / (counts - 1))
        quantiles = np.array([[t_quantile((1 + confidence) / 2, int(count) - 1)] for count in counts[:, 0]])
        return means - quantiles * deviations * np.sqrt(2.0 / counts)


def t_quantile(confidence: float, freedom: int) -> float:
    """One-sided (Abramowitz and Stegun 26.7.5)."""
    z, v = NormalDist().inv_cdf(confidence), float(max(freedom, 1))
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / v + second / v**2


def cheapest_that_holds(found: Margins, weights: Weights, confidence: float) -> list[int | None]:
    """Of each split, the number of a tolerance. None: nothing holds it (a floor above 1).

    Two walks towards the cheapest model: from the best model always, and from the best chance of each prompt, which may be better than
    any one model. Each may err with half of the probability that is allowed, since bounds are two-sided.
    """
    holds = found.lower_bounds(weights, confidence) >= 0
    if found.floor <= 1.0:
        holds[:, 0] = True  # the best model is always as good as itself, however little data there is
    starts = (0, found.argmax)
    return [max((_last_that_holds(one, start) for start in starts if one[start]), default=None) for one in holds]


def _last_that_holds(holds: NDArray[np.bool_], start: int) -> int:
    failed = np.flatnonzero(~holds[start:])
    return start + (int(failed[0]) if len(failed) else len(holds) - start) - 1


def ratio_of(score: float, best: float) -> float:
    """Where the best model is never right, any other is as good."""
    return score / best if best > 0 else 1.0


def check_floor(found: Margins, confidence: float, seed: int = 0, num_splits: int = NUM_SPLITS) -> FloorCheck:
    random, missed, ratios = np.random.default_rng(seed), 0, list[float]()
    shares, cheap = list[float](), list[float]()
    scores, best = found.scores, found.best
    for first in range(0, num_splits, BLOCK_SPLITS):
        count = min(BLOCK_SPLITS, num_splits - first)
        weights = np.stack([(random.permutation(len(scores)) % 2 == 0).astype(np.float32) for _ in range(count)])
        for in_first, chosen in zip(weights, cheapest_that_holds(found, weights, confidence), strict=True):
            if chosen is None:  # nothing is promised, so nothing is missed
                continue
            others = np.flatnonzero(in_first == 0)
            choices = found.path.choices[others, chosen].astype(np.int64)
            ratio = ratio_of(float(scores[others, choices].mean()), float(scores[others, best].mean()))
            missed += ratio < found.floor - ROUNDING
            ratios.append(ratio)
            shares.append(float((choices == best).mean()))
            cheap.append(float((choices == 0).mean()))
    return FloorCheck(
        num_splits=num_splits, num_missed=missed, mean_share_of_best=float(np.mean(shares or [1.0])),
        mean_cheap_share=float(np.mean(cheap or [0.0])), worst_ratio=min(ratios, default=1.0),
    )  # fmt: skip
