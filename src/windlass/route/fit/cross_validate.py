"""Predictions for every prompt by a router that has not seen it: honest numbers, and what thresholds are calibrated on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windlass.errors import BadInput
from windlass.route.fit.encode import Raw
from windlass.route.fit.folds import By, clusters_of, make_folds
from windlass.route.fit.model import choose_settings, fit_predictor
from windlass.route.tables.table import Table


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Of every row of a table, by the fold that left it out."""

    chances: NDArray[np.float64]
    """[prompts, models]"""
    novelty: NDArray[np.float64]
    fold: NDArray[np.int64]
    how: str


def cross_validate(table: Table, raw: Raw, by: By, seed: int = 0, done: Callable[[], None] = lambda: None) -> HeldOut:
    """`done` is called after each fold. Settings are chosen inside each fold, on a part of its own rows."""
    if by == "groups" and not table.has_groups:
        raise BadInput("the table names one group only; whole groups cannot be left out")
    folds = make_folds(clusters_of(table.prompts, table.groups, by), seed=seed)
    chances, novelty, which = np.zeros_like(table.scores), np.zeros(len(table)), np.zeros(len(table), dtype=np.int64)
    for number, fold in enumerate(folds):
        inside, own = table.rows(fold.train), raw.rows(fold.train)
        inner = make_folds(clusters_of(inside.prompts, inside.groups, "prompts"), seed=seed + 1)[
            0
        ]  # as for the router that is kept
        settings = choose_settings(own, inside.groups, inside.scores, inner)
        predictor = fit_predictor(own, inside.groups, inside.scores, settings)
        held = raw.rows(fold.held_out)
        chances[fold.held_out] = predictor.predict(held)
        novelty[fold.held_out] = predictor.encoder.novelty(held)
        which[fold.held_out] = number
        done()
    unit = "equal prompts together" if by == "prompts" else "whole groups left out"
    return HeldOut(chances, novelty, which, f"{len(folds)}-fold, {unit}")
