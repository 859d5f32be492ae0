"""A table to a router: cross-validated predictions, a tolerance calibrated to the floor, and the predictor fitted to all rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windlass.core.model import Frozen
from windlass.errors import BadInput
from windlass.route.decide.path import Path, walk
from windlass.route.decide.router_file import FORMAT, PathPoint, RoutedModel, RouterFile, pack
from windlass.route.features.ngrams import BITS
from windlass.route.fit.cross_validate import HeldOut, choose_penalties, cross_validate, folds_of
from windlass.route.fit.encode import Raw, read
from windlass.route.fit.floor import FloorCheck, Margins, cheapest_that_holds, check_floor, margins
from windlass.route.fit.model import SHARE_OF_SOURCES, Predictor, fit_predictor
from windlass.route.tables.table import Table

UNLIKE_QUANTILE = 0.995
"""So many of the held-out prompts are not unlike the rest, by definition."""
Done = Callable[[], None]


class FitOptions(Frozen):
    floor: float = 0.95
    """Of the best single model's quality."""
    confidence: float = 0.95
    seed: int = 0
    region: str = "world"
    """Whose electricity, for CO2."""
    energy: str = "as the tables have it"
    """How joules were found: counters, or an estimate."""

    def __post_init__(self) -> None:
        if not 0.0 < self.floor <= 2.0:
            raise BadInput(f"--floor is {self.floor:g}; it is a share of the best model's quality, such as 0.95")
        if not 0.5 <= self.confidence < 1.0:
            raise BadInput(f"--confidence is {self.confidence:g}; it should be at least 0.5 and below 1, such as 0.95")


@dataclass(frozen=True, slots=True)
class Fitted:
    """Everything a report is made of."""

    table: Table
    held_out: HeldOut
    by_groups: HeldOut | None
    path: Path
    chosen: int
    """The tolerance, as a number on the path."""
    crossed: NDArray[np.int64]
    """Each prompt's model, with the tolerance calibrated on the other folds."""
    check: FloorCheck
    options: FitOptions
    router: RouterFile


NUM_STEPS = 17
"""How often `done` is called: five folds, three times, and two more."""


def fit(table: Table, options: FitOptions, done: Done = lambda: None) -> Fitted:
    raw = read(table.prompts)
    done()
    folds = folds_of(table, "prompts", options.seed)
    penalties, penalty = choose_penalties(table, raw, folds, done)
    held = cross_validate(table, raw, folds, penalties, "equal prompts together", done)
    by_groups = _by_groups(table, raw, penalty, options.seed, done) if table.has_groups else None
    path, best = walk(held.chances, table.best), table.best
    found = margins(path, table.scores, best, options.floor)
    every = np.ones(len(table), dtype=np.float32)
    chosen = cheapest_that_holds(found, every, options.confidence)
    if chosen is None:
        raise _unreachable(path, table, options)
    crossed = _crossed(found, path, held.fold, options.confidence)
    check = check_floor(found, path, table.scores, best, options.confidence, options.seed)
    predictor = fit_predictor(raw, table.groups, table.scores, penalty)
    done()
    router = _router(table, held, path, chosen, predictor, options)
    return Fitted(table, held, by_groups, path, chosen, crossed, check, options, router)


def _unreachable(path: Path, table: Table, options: FitOptions) -> BadInput:
    """What the floor could be: the best ratio that can be shown on these answers."""
    low, high = 1.0, options.floor  # the best model itself is always as good as itself
    for _ in range(20):
        middle = (low + high) / 2
        found = margins(path, table.scores, table.best, middle)
        holds = cheapest_that_holds(found, np.ones(len(table), dtype=np.float32), options.confidence) is not None
        low, high = (middle, high) if holds else (low, middle)
    best = table.models[table.best]
    return BadInput(
        f"no model and no mix of them is shown to reach {options.floor:g} times the quality of {best} with "
        f"{options.confidence:.0%} confidence; the most that these {len(table):,} prompts show is --floor {np.floor(low * 1000) / 1000:g}"
    )


def _crossed(found: Margins, path: Path, fold: NDArray[np.int64], confidence: float) -> NDArray[np.int64]:
    chosen = np.zeros(len(fold), dtype=np.int64)
    for number in np.unique(fold):
        mine = fold == number
        place = cheapest_that_holds(found, (~mine).astype(np.float32), confidence) or 0
        chosen[mine] = path.choices[mine, place]
    return chosen


def _by_groups(table: Table, raw: Raw, penalty: float, seed: int, done: Done) -> HeldOut:
    """With the penalty of the router that is kept: it is to be told how that one does with new groups."""
    folds = folds_of(table, "groups", seed)
    return cross_validate(table, raw, folds, [penalty] * len(folds), "whole groups left out", done)


def _mean(values: NDArray[np.float64]) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None


def _points(table: Table, path: Path) -> tuple[PathPoint, ...]:
    scores, costs = path.taken(table.scores).mean(axis=0), path.taken(table.costs).mean(axis=0)
    seconds, joules = path.taken(table.seconds), path.taken(table.joules)
    found: list[PathPoint] = []
    for place, tolerance in enumerate(path.tolerances):
        share = np.bincount(path.choices[:, place], minlength=len(table.models)) / len(table)
        found.append(
            PathPoint(
                tolerance=float(tolerance), score=float(scores[place]), cost=float(costs[place]),
                seconds=_mean(seconds[:, place].astype(float)), joules=_mean(joules[:, place].astype(float)),
                share=dict(zip(table.models, share.tolist(), strict=True)),
            )
        )  # fmt: skip
    return tuple(found)


def _router(table: Table, held: HeldOut, path: Path, chosen: int, predictor: Predictor, options: FitOptions) -> RouterFile:
    taken = np.take_along_axis(held.chances, path.choices[:, [chosen]].astype(np.int64), axis=1)
    models = tuple(
        RoutedModel(
            name=name, score=float(table.scores[:, i].mean()), cost=float(table.costs[:, i].mean()),
            seconds=_mean(table.seconds[:, i]), joules=_mean(table.joules[:, i]),
        )
        for i, name in enumerate(table.models)
    )  # fmt: skip
    sources, used = predictor.sources, np.flatnonzero(predictor.encoder.rarity)
    return RouterFile(
        format=FORMAT, models=models, best=table.best, tolerance=float(path.tolerances[chosen]), floor=options.floor,
        confidence=options.confidence, cost_unit=table.cost_unit, num_prompts=len(table), bits=BITS,
        penalty=predictor.penalty, share_of_sources=SHARE_OF_SOURCES if sources is not None else 0.0,
        columns=pack(used, "<i4"),
        rarity=pack(predictor.encoder.rarity[used]), mean=tuple(predictor.encoder.mean.tolist()),
        deviation=tuple(predictor.encoder.deviation.tolist()), bias=tuple(predictor.linear.bias.tolist()),
        words=pack(predictor.linear.words[:, used]), shape=pack(predictor.linear.shape, "<f8"),
        max_novelty=float(np.quantile(held.novelty, UNLIKE_QUANTILE)), path=_points(table, path),
        mean_chance=float(taken.mean()), low_chance=float(np.quantile(taken, 0.05)),
        centroids=None if sources is None else pack(sources.centroids), means=None if sources is None else pack(sources.means, "<f8"),
    )  # fmt: skip
