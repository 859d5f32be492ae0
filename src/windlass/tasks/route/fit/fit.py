"""A table to a router: cross-validated predictions, a tolerance calibrated to the floor, and the predictor fitted to all rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windlass.core.model import Frozen
from windlass.errors import BadInput
from windlass.tasks.route.decide.path import Path, walk
from windlass.tasks.route.decide.router_file import FORMAT, PathPoint, RoutedModel, RouterFile, pack
from windlass.tasks.route.features.ngrams import BITS
from windlass.tasks.route.fit.cross_validate import HeldOut, cross_validate, leave_out_groups
from windlass.tasks.route.fit.encode import read
from windlass.tasks.route.fit.floor import FloorCheck, Margins, cheapest_that_holds, check_floor
from windlass.tasks.route.fit.model import SHARE_OF_SOURCES, Predictor, fit_predictor
from windlass.tasks.route.tables.table import Table

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


NUM_STEPS = 12
"""How often `done` is called: five folds, twice, and two more."""


def fit(table: Table, options: FitOptions, done: Done = lambda: None) -> Fitted:
    raw = read(table.prompts)
    done()
    held, penalty = cross_validate(table, raw, options.seed, done)
    by_groups = leave_out_groups(table, raw, penalty, options.seed, done) if table.has_groups else None
    [predictor] = fit_predictor(raw, np.ones(len(table), dtype=np.bool_), table.groups, table.scores, (penalty,))
    path = walk(held.chances, table.best)
    found = Margins(path, table.scores, table.best, options.floor)
    chosen = _calibrated(found, options.confidence)
    if chosen is None:
        raise _unreachable(path, table, options)
    crossed = _crossed(found, held.fold, options.confidence)
    check = check_floor(found, options.confidence, options.seed)
    done()
    router = _router(table, held, path, chosen, predictor, options)
    return Fitted(table, held, by_groups, path, chosen, crossed, check, options, router)


def _unreachable(path: Path, table: Table, options: FitOptions) -> BadInput:
    """What the floor could be: the best ratio that can be shown on these answers."""
    low, high = 1.0, options.floor  # the best model itself is always as good as itself
    for _ in range(20):
        middle = (low + high) / 2
        holds = _calibrated(Margins(path, table.scores, table.best, middle), options.confidence) is not None
        low, high = (middle, high) if holds else (low, middle)
    best = table.models[table.best]
    return BadInput(
        f"no model and no mix of them is shown to reach {options.floor:g} times the quality of {best} with "
        f"{options.confidence:.0%} confidence; the most that these {len(table):,} prompts show is --floor {np.floor(low * 1000) / 1000:g}"
    )


def _calibrated(found: Margins, confidence: float) -> int | None:
    """On all rows."""
    [chosen] = cheapest_that_holds(found, np.ones((1, len(found.scores)), dtype=np.float32), confidence)
    return chosen


def _crossed(found: Margins, fold: NDArray[np.int64], confidence: float) -> NDArray[np.int64]:
    chosen, numbers = np.zeros(len(fold), dtype=np.int64), np.unique(fold)
    others = np.stack([(fold != number).astype(np.float32) for number in numbers])
    for number, place in zip(numbers, cheapest_that_holds(found, others, confidence), strict=True):
        chosen[fold == number] = found.path.choices[fold == number, place or 0]
    return chosen


def _mean(values: NDArray[np.float64]) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None


def _known(value: np.float64) -> float | None:
    return None if np.isnan(value) else float(value)


def _points(table: Table, path: Path) -> tuple[PathPoint, ...]:
    scores, costs, seconds, joules = (path.means(values) for values in (table.scores, table.costs, table.seconds, table.joules))
    found: list[PathPoint] = []
    for place, tolerance in enumerate(path.tolerances):
        share = np.bincount(path.choices[:, place], minlength=len(table.models)) / len(table)
        found.append(
            PathPoint(
                tolerance=float(tolerance), score=float(scores[place]), cost=float(costs[place]),
                seconds=_known(seconds[place]), joules=_known(joules[place]),
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
    sources, encoded = predictor.sources, predictor.encoded
    used = np.flatnonzero(encoded.rarity)
    return RouterFile(
        format=FORMAT, models=models, best=table.best, tolerance=float(path.tolerances[chosen]), floor=options.floor,
        confidence=options.confidence, cost_unit=table.cost_unit, num_prompts=len(table), bits=BITS,
        penalty=predictor.penalty, share_of_sources=SHARE_OF_SOURCES if sources is not None else 0.0,
        columns=pack(encoded.raw.features[used], "<i4"), rarity=pack(encoded.rarity[used]), mean=tuple(encoded.mean.tolist()),
        deviation=tuple(encoded.deviation.tolist()), bias=tuple(predictor.linear.bias.tolist()),
        words=pack(predictor.linear.weights[:, used]), shape=pack(predictor.linear.weights[:, encoded.num_words :], "<f8"),
        max_novelty=float(np.quantile(held.novelty, UNLIKE_QUANTILE)), path=_points(table, path),
        mean_chance=float(taken.mean()), low_chance=float(np.quantile(taken, 0.05)),
        centroids=None if sources is None else pack(sources.centroids.T), means=None if sources is None else pack(sources.means, "<f8"),
    )  # fmt: skip
