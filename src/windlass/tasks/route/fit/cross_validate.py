"""Predictions for every prompt by a router that has not seen it: honest numbers, and what thresholds are calibrated on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windlass.errors import BadInput
from windlass.tasks.route.fit.encode import Raw
from windlass.tasks.route.fit.folds import By, Fold, clusters_of, make_folds
from windlass.tasks.route.fit.model import PENALTIES, fit_predictor, mixed
from windlass.tasks.route.tables.table import Table

Done = Callable[[], None]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Of every row of a table, by the fold that left it out."""

    chances: NDArray[np.float64]
    """[prompts, models]"""
    novelty: NDArray[np.float64]
    fold: NDArray[np.int64]
    how: str


def folds_of(table: Table, by: By, seed: int) -> list[Fold]:
    if by == "groups" and not table.has_groups:
        raise BadInput("the table names one group only; whole groups cannot be left out")
    return make_folds(clusters_of(table.prompts, table.groups, by), seed=seed)


def cross_validate(table: Table, raw: Raw, seed: int, done: Done = lambda: None) -> tuple[HeldOut, float]:
    """And the penalty for all rows. A fold's comes from the errors on the *other* folds' held-out rows: no row has a say in its own."""
    folds = folds_of(table, "prompts", seed)
    found = _held_out(table, raw, folds, PENALTIES, done)
    errors = np.array([_errors(found.by_words, table.scores, fold.held_out) for fold in folds])
    total = errors.sum(axis=0)
    chances, which = np.zeros_like(table.scores), np.zeros(len(table), dtype=np.int64)
    for number, fold in enumerate(folds):
        chosen = int(np.argmin(total - errors[number]))
        chances[fold.held_out] = found.chances(chosen)[fold.held_out]
        which[fold.held_out] = number
    held = HeldOut(chances, found.novelty, which, f"{len(folds)}-fold, equal prompts together")
    return held, PENALTIES[int(np.argmin(total))]


def leave_out_groups(table: Table, raw: Raw, penalty: float, seed: int, done: Done = lambda: None) -> HeldOut:
    """With the penalty of the router that is kept: it is to be told how that one does with new groups."""
    folds = folds_of(table, "groups", seed)
    found = _held_out(table, raw, folds, (penalty,), done)
    which = np.zeros(len(table), dtype=np.int64)
    for number, fold in enumerate(folds):
        which[fold.held_out] = number
    return HeldOut(found.chances(0), found.novelty, which, f"{len(folds)}-fold, whole groups left out")


@dataclass(frozen=True, slots=True)
class _Found:
    by_words: NDArray[np.float32]
    """Of the regression alone, by which a penalty is chosen: [penalties, rows, models]."""
    by_source: NDArray[np.float64]
    """NaN: the fold had no sources to guess."""
    novelty: NDArray[np.float64]

    def chances(self, penalty: int) -> NDArray[np.float64]:
        by_words = self.by_words[penalty].astype(np.float64)
        return np.where(np.isnan(self.by_source), by_words, mixed(by_words, self.by_source))


def _held_out(table: Table, raw: Raw, folds: Sequence[Fold], penalties: Sequence[float], done: Done) -> _Found:
    """`done` is called after each fold."""
    by_words = np.zeros((len(penalties), *table.scores.shape), dtype=np.float32)
    found = _Found(by_words, np.full(table.scores.shape, np.nan), np.zeros(len(table)))
    for fold in folds:
        _predict_fold(table, raw, fold.held_out, penalties, found)
        done()
    return found


def _predict_fold(table: Table, raw: Raw, held: NDArray[np.int64], penalties: Sequence[float], found: _Found) -> None:
    """A function of its own, so that a fold's weights are gone before the next one's are made."""
    is_train = np.ones(len(table), dtype=np.bool_)
    is_train[held] = False
    predictors = fit_predictor(raw, is_train, table.groups, table.scores, penalties)
    encoded, sources = predictors[0].encoded, predictors[0].sources
    if sources is not None:
        found.by_source[held] = sources.predict(encoded, held)
    for number, one in enumerate(predictors):
        found.by_words[number, held] = one.linear.predict(encoded)[held]
    found.novelty[held] = encoded.novelty()[held]


def _errors(by_words: NDArray[np.float32], scores: NDArray[np.float64], held: NDArray[np.int64]) -> NDArray[np.float64]:
    """Squared, for each penalty, of the gain of the best model over the cheapest other one: enough to choose by, however many there are."""
    best = int(np.argmax(scores.mean(axis=0)))
    other = 0 if best else 1
    gains = scores[held, best] - scores[held, other]
    return ((by_words[:, held, best] - by_words[:, held, other] - gains) ** 2).sum(axis=1)
