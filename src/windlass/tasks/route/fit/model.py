"""The predictor of a router: each model's chance of being right, from the prompt alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windlass.tasks.route.fit.encode import Encoded, Mask, Raw, encode
from windlass.tasks.route.fit.ridge import Linear, fit_ridge
from windlass.tasks.route.fit.sources import Sources, fit_sources

PENALTIES = (3.0, 10.0, 30.0, 100.0)
SHARE_OF_SOURCES = 0.5
"""Half of a prediction comes from the guessed source, where there are several; half from the regression. Choosing the share on
held-out rows was no better than this (docs/log.md)."""


@dataclass(frozen=True, slots=True)
class Predictor:
    encoded: Encoded
    linear: Linear
    sources: Sources | None
    penalty: float

    def predict(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """[rows, models]. A little below 0 or above 1 too: cutting them off would lose which of two prompts gains more."""
        by_source = None if self.sources is None else self.sources.predict(self.encoded, numbers)
        return mixed(self.linear.predict(self.encoded)[numbers], by_source)


def mixed(by_words: NDArray[np.float64], by_source: NDArray[np.float64] | None) -> NDArray[np.float64]:
    return by_words if by_source is None else (1 - SHARE_OF_SOURCES) * by_words + SHARE_OF_SOURCES * by_source


def fit_predictor(
    raw: Raw, is_train: Mask, groups: Sequence[str], scores: NDArray[np.float64], penalties: Sequence[float]
) -> list[Predictor]:
    """One for each penalty; they share what does not depend on it."""
    encoded = encode(raw, is_train)
    sources = fit_sources(encoded, is_train, groups, scores)
    linears = fit_ridge(encoded, is_train, scores, penalties)
    return [Predictor(encoded, one, sources, penalty) for one, penalty in zip(linears, penalties, strict=True)]
