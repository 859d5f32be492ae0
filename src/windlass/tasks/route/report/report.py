"""What `windlass route fit` and `report` say, as one value with stable keys. Everything was measured on prompts the router had not seen."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from windlass.core.statistics.intervals import Z
from windlass.tasks.route.fit.curve import GapCurve, Pair, with_intervals
from windlass.tasks.route.fit.fit import Fitted
from windlass.tasks.route.fit.floor import ROUNDING, ratio_of
from windlass.tasks.route.report.baselines import Outcome, by_length, mean_interval, oracle, outcome, random_like
from windlass.tasks.route.tables.table import Table

ROUTELLM_BEST_MMLU_APGR = 0.603
"""arXiv 2406.18665, table of MMLU with the judge's data."""


def report_of(fitted: Fitted) -> dict[str, Any]:
    table, held = fitted.table, fitted.held_out
    region = fitted.options.region
    router = outcome(table, fitted.crossed, f"{held.how}; the tolerance calibrated on the other folds", region=region)
    share = np.array([router.share[name] for name in table.models])
    gap = _gap(table, held.chances, held.how, None)
    lengths = np.array([float(len(prompt)) for prompt in table.prompts])
    length_gap = _curve(table, lengths, "prompt length", None)
    made: dict[str, Any] = {
        "models": [_model(table, i, region) for i in range(len(table.models))],
        "router": msgspec.to_builtins(router),
        "baselines": {
            "random": msgspec.to_builtins(random_like(table, share)),
            "length": msgspec.to_builtins(
                outcome(table, by_length(table, share), "longest prompts to the dearest model", _apgr(length_gap))
            ),
            "best_single": _best_single(table),
            "oracle": msgspec.to_builtins(outcome(table, oracle(table), "the cheapest model that is right, known afterwards")),
        },
        **_gap_keys(gap),
        "floor": _floor(fitted),
        "over_best_single": _over_best(fitted, router),
        "new_groups": None,
        "calibration": [_calibration(name, held.chances[:, i], table.scores[:, i]) for i, name in enumerate(table.models)],
        "cross_validation": held.how,
        "abstained": float((held.novelty > fitted.router.max_novelty).mean()),
        "cost_unit": table.cost_unit,
        "energy": fitted.options.energy,
        "region": fitted.options.region,
        "num_prompts": len(table),
        "num_groups": len(set(table.groups)),
        "num_dropped": table.num_dropped,
        "path": msgspec.to_builtins(_thinned(fitted)),
    }
    if fitted.by_groups is not None:
        other = _gap(table, fitted.by_groups.chances, fitted.by_groups.how, table.groups)
        made["new_groups"] = _gap_keys(other) | {"cross_validation": fitted.by_groups.how}
    return made


def _model(table: Table, place: int, region: str) -> dict[str, Any]:
    only = outcome(table, np.full(len(table), place), "always this model", model=table.models[place], region=region)
    return {"name": table.models[place], **msgspec.to_builtins(only)}


def _best_single(table: Table) -> dict[str, Any]:
    name = table.models[table.best]
    return msgspec.to_builtins(outcome(table, np.full(len(table), table.best), "always the best model", model=name))


def _curve(table: Table, order: NDArray[np.float64], how: str, clusters: tuple[str, ...] | None) -> GapCurve | None:
    """Of the first and the last of two models; with more there is no single gap."""
    if len(table.models) != 2:
        return None
    return with_intervals(order, table.scores[:, 0], table.scores[:, 1], how, clusters)


def _gap(table: Table, chances: NDArray[np.float64], how: str, clusters: tuple[str, ...] | None) -> GapCurve | None:
    return _curve(table, chances[:, -1] - chances[:, 0], how, clusters)


def _apgr(found: GapCurve | None) -> float | None:
    return None if found is None else found.apgr


def _gap_keys(found: GapCurve | None) -> dict[str, Any]:
    names = ("apgr", "cpt50", "cpt80")
    if found is None:
        return dict.fromkeys(names) | {"intervals": dict.fromkeys(names)}
    return {name: getattr(found, name) for name in names} | {
        "intervals": {name: getattr(found, f"{name}_interval") for name in names}
    }


def _floor(fitted: Fitted) -> dict[str, Any]:
    """`held`: the router's score over the best model's, on prompts that neither the predictor nor the tolerance has seen."""
    table = fitted.table
    best = table.scores[:, table.best]
    taken = np.take_along_axis(table.scores, fitted.crossed[:, None], axis=1)[:, 0]
    ratio = ratio_of(float(taken.mean()), float(best.mean()))
    return {
        "asked": fitted.options.floor,
        "held": ratio,
        "held_interval": _ratio_interval(taken, best),
        "confidence": fitted.options.confidence,
        "is_held": ratio >= fitted.options.floor - ROUNDING,
        "tolerance": fitted.router.tolerance,
        "cheap_share": float((fitted.crossed != table.best).mean()),
        "splits": msgspec.to_builtins(fitted.check),
        "cross_validation": fitted.held_out.how,
    }


def _ratio_interval(above: NDArray[np.float64], below: NDArray[np.float64]) -> Pair:
    """By the delta method: the residuals of above = ratio x below."""
    mean = float(below.mean())
    if mean <= 0:
        return 1.0, 1.0
    ratio = float(above.mean()) / mean
    half = Z * float((above - ratio * below).std(ddof=1)) / mean / len(above) ** 0.5
    return ratio - half, ratio + half


def _over_best(fitted: Fitted, router: Outcome) -> dict[str, Any]:
    """Paired, on the same prompts."""
    table = fitted.table
    taken = np.take_along_axis(table.scores, fitted.crossed[:, None], axis=1)[:, 0]
    best_cost = float(table.costs[:, table.best].mean())
    return {
        "score": float((taken - table.scores[:, table.best]).mean()),
        "score_interval": mean_interval(taken - table.scores[:, table.best]),
        "cost": router.cost - best_cost,
        "cost_ratio": router.cost / best_cost if best_cost else None,
    }


def _calibration(name: str, chances: NDArray[np.float64], scores: NDArray[np.float64]) -> dict[str, Any]:
    """Brier score, beside that of always predicting the mean; and, in tenths of the prompts, predicted against found."""
    chances = np.clip(chances, 0.0, 1.0)
    order = np.array_split(np.argsort(chances, kind="stable"), 10)
    bins = [[float(chances[part].mean()), float(scores[part].mean()), len(part)] for part in order if len(part)]
    base = float(((scores - scores.mean()) ** 2).mean())
    return {"model": name, "brier": float(((chances - scores) ** 2).mean()), "brier_of_mean": base, "bins": bins}


def _thinned(fitted: Fitted) -> list[Any]:
    """At most 40 points for the plot."""
    points = fitted.router.path
    return [points[int(place)] for place in np.unique(np.linspace(0, len(points) - 1, 40).astype(int))]
