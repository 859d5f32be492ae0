"""What a router is compared with on the same prompts: random, by length, the best single model, the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windlass.core.hardware.energy import co2_kg, energy_kwh, grid
from windlass.core.model import Frozen
from windlass.core.statistics.intervals import Z, wilson
from windlass.tasks.route.fit.curve import Pair
from windlass.tasks.route.tables.table import Table

JOULES_PER_KWH = 3.6e6


class Outcome(Frozen):
    """Of one way to choose models."""

    score: float
    score_interval: Pair
    cost: float
    cost_interval: Pair
    seconds: float | None = None
    seconds_p50: float | None = None
    seconds_p95: float | None = None
    tokens: float | None = None
    """Of an answer."""
    joules: float | None = None
    """Of an answer; None unless it is known of every one, so that what is known and what is not are never mixed."""
    grams_co2: float | None = None
    share: dict[str, float] = {}
    model: str = ""
    """Of a single model."""
    apgr: float | None = None
    how: str = ""


def mean_interval(values: NDArray[np.float64]) -> Pair:
    half = Z * float(values.std(ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return float(values.mean()) - half, float(values.mean()) + half


def share_interval(scores: NDArray[np.float64]) -> Pair:
    """Of scores from 0 to 1: Wilson's, where each is right or wrong."""
    if bool(np.isin(scores, (0.0, 1.0)).all()):
        return wilson(float(scores.sum()), len(scores))
    low, high = mean_interval(scores)
    return max(low, 0.0), min(high, 1.0)


def known_mean(values: NDArray[np.float64]) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else None


def grams_of(joules: float | None, region: str) -> float | None:
    if joules is None:
        return None
    return 1000 * co2_kg(energy_kwh(1.0, 1000 * joules / JOULES_PER_KWH), grid(region).grams_per_kwh)


def _measured(
    seconds: NDArray[np.float64], joules: NDArray[np.float64], tokens: NDArray[np.float64], region: str
) -> dict[str, Any]:
    known = seconds[~np.isnan(seconds)]
    used = None if np.isnan(joules).any() else float(joules.mean())
    return {
        "seconds": known_mean(seconds),
        "seconds_p50": float(np.median(known)) if known.size else None,
        "seconds_p95": float(np.quantile(known, 0.95)) if known.size else None,
        "tokens": known_mean(tokens) or None,
        "joules": used,
        "grams_co2": grams_of(used, region),
    }


def outcome(
    table: Table, chosen: NDArray[np.int64], how: str, apgr: float | None = None, model: str = "", region: str = "world"
) -> Outcome:
    """`chosen`: each prompt's model, as a column."""
    scores, costs, seconds, joules, tokens = (
        np.take_along_axis(array, chosen[:, None], axis=1)[:, 0]
        for array in (table.scores, table.costs, table.seconds, table.joules, table.tokens)
    )
    share = np.bincount(chosen, minlength=len(table.models)) / len(table)
    return Outcome(
        score=float(scores.mean()), score_interval=share_interval(scores), cost=float(costs.mean()), cost_interval=mean_interval(costs),
        share=dict(zip(table.models, share.tolist(), strict=True)), model=model, apgr=apgr, how=how,
        **_measured(seconds, joules, tokens, region),
    )  # fmt: skip


def random_like(table: Table, share: NDArray[np.float64]) -> Outcome:
    """The expectation over all random choices with these shares, not one draw."""
    scores, costs = table.scores @ share, table.costs @ share
    return Outcome(
        score=float(scores.mean()), score_interval=share_interval(scores), cost=float(costs.mean()), cost_interval=mean_interval(costs),
        seconds=known_mean(table.seconds @ share), share=dict(zip(table.models, share.tolist(), strict=True)),
        apgr=0.5, how="as many calls of each model as the router, at random",
    )  # fmt: skip


def by_length(table: Table, share: NDArray[np.float64]) -> NDArray[np.int64]:
    """Longer prompts to dearer models, as many of each as the router."""
    order = np.argsort([len(prompt) for prompt in table.prompts], kind="stable")
    ends = np.round(np.cumsum(share) * len(table)).astype(int)
    chosen = np.zeros(len(table), dtype=np.int64)
    for model, (first, last) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        chosen[order[first:last]] = model
    return chosen


def oracle(table: Table) -> NDArray[np.int64]:
    """The cheapest of the models that did best on the prompt."""
    return np.argmax(table.scores >= table.scores.max(axis=1, keepdims=True), axis=1)
