"""The predictor of a router: each model's chance of being right, from the prompt alone. Its penalty is chosen on held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windlass.route.fit.encode import Encoder, Raw, learn
from windlass.route.fit.folds import Fold
from windlass.route.fit.ridge import Linear, fit_ridge
from windlass.route.fit.sources import Sources, fit_sources

PENALTIES = (3.0, 10.0, 30.0, 100.0)
SHARE_OF_SOURCES = 0.5
"""Half of a prediction comes from the guessed source, where there are several; half from the regression. Choosing the share on
held-out rows was no better than this (docs/log.md)."""


@dataclass(frozen=True, slots=True)
class Predictor:
    encoder: Encoder
    linear: Linear
    sources: Sources | None
    penalty: float

    def predict(self, raw: Raw) -> NDArray[np.float64]:
        """[prompts, models]. A little below 0 or above 1 too: cutting them off would lose which of two prompts gains more."""
        encoded = self.encoder.encode(raw)
        found = self.linear.predict(encoded)
        if self.sources is not None:
            found = (1 - SHARE_OF_SOURCES) * found + SHARE_OF_SOURCES * self.sources.predict(encoded.words)
        return found


def fit_predictor(raw: Raw, groups: Sequence[str], scores: NDArray[np.float64], penalty: float) -> Predictor:
    encoder = learn(raw)
    encoded = encoder.encode(raw)
    return Predictor(encoder, fit_ridge(encoded, scores, penalty), fit_sources(encoded.words, groups, scores), penalty)


def selection_errors(raw: Raw, scores: NDArray[np.float64], fold: Fold) -> NDArray[np.float64]:
    """For each penalty, the regression's squared error on the fold's held-out rows, of the gain of the best model over another one."""
    gains = _gains(scores)
    encoder = learn(raw.rows(fold.train))
    train, held = encoder.encode(raw.rows(fold.train)), encoder.encode(raw.rows(fold.held_out))
    found = [fit_ridge(train, gains[fold.train], penalty).predict(held) for penalty in PENALTIES]
    return np.array([float(((gains[fold.held_out] - one) ** 2).sum()) for one in found])


def _gains(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of the best model over the one cheapest other, as one column: enough to choose a penalty, however many models there are."""
    best = int(np.argmax(scores.mean(axis=0)))
    other = 0 if best else 1
    return (scores[:, best] - scores[:, other])[:, None]
