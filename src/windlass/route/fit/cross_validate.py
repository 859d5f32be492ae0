"""Predictions for every prompt by a router that has not seen it: honest numbers, and what thresholds are calibrated on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windlass.errors import BadInput
from windlass.route.fit.encode import Raw
from windlass.route.fit.folds import By, Fold, clusters_of, make_folds
from windlass.route.fit.model import PENALTIES, fit_predictor, selection_errors
from windlass.route.tables.table import Table


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Of every row of a table, by the fold that left it out."""

    chances: NDArray[np.float64]
    """[prompts, models]"""
    novelty: NDArray[np.float64]
    fold: NDArray[np.int64]
    how: str


def choose_penalties(table: Table, raw: Raw, folds: Sequence[Fold], done: Callable[[], None]) -> tuple[list[float], float]:
    """One for each fold, from the errors on the *other* folds' held-out rows, so that no row has a say in its own; and one from all."""
    errors: list[NDArray[np.float64]] = []
    for fold in folds:
        errors.append(selection_errors(raw, table.scores, fold))
        done()
    total = np.sum(errors, axis=0)
    return [PENALTIES[int(np.argmin(total - own))] for own in errors], PENALTIES[int(np.argmin(total))]


def folds_of(table: Table, by: By, seed: int) -> list[Fold]:
    if by == "groups" and not table.has_groups:
        raise BadInput("the table names one group only; whole groups cannot be left out")
    return make_folds(clusters_of(table.prompts, table.groups, by), seed=seed)


def cross_validate(
    table: Table, raw: Raw, folds: Sequence[Fold], penalties: Sequence[float], how: str, done: Callable[[], None] = lambda: None
) -> HeldOut:
    """`done` is called after each fold."""
    chances, novelty, which = np.zeros_like(table.scores), np.zeros(len(table)), np.zeros(len(table), dtype=np.int64)
    for number, (fold, penalty) in enumerate(zip(folds, penalties, strict=True)):
        inside = table.rows(fold.train)
        predictor = fit_predictor(raw.rows(fold.train), inside.groups, inside.scores, penalty)
        held = raw.rows(fold.held_out)
        chances[fold.held_out] = predictor.predict(held)
        novelty[fold.held_out] = predictor.encoder.novelty(held)
        which[fold.held_out] = number
        done()
    return HeldOut(chances, novelty, which, f"{len(folds)}-fold, {how}")
