"""A logistic rule from a model's own confidence to its chance of being right, and the threshold below which an answer is passed on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from windlass.tasks.route.decide.confidence import NAMES
from windlass.tasks.route.decide.router_file import Confident
from windlass.tasks.route.fit.folds import make_folds
from windlass.tasks.route.tables.answers import Answer

MIN_ANSWERS = 50
PENALTY = 1.0
NUM_STEPS = 25


def fit_confident(answers: Sequence[Answer], models: Sequence[str]) -> tuple[Confident, ...]:
    """Of models whose answers have confidences (`windlass eval --confidence`) and are not all right or all wrong."""
    found: list[Confident] = []
    if not any(answer.confidence for answer in answers):
        return ()
    scores = {(answer.model, answer.group, answer.id or answer.prompt): answer.score for answer in answers}
    for place, model in enumerate(models):
        mine = [answer for answer in answers if answer.model == model and answer.confidence]
        right = np.array([answer.score >= 0.5 for answer in mine], dtype=float)
        if len(mine) >= MIN_ANSWERS and 0 < right.sum() < len(mine):
            other = models[place + 1 :] or models[:place]
            passed_on = _scores_of(mine, scores, other)
            found.append(_fit_one(model, mine, right, passed_on))
    return tuple(found)


def _scores_of(mine: Sequence[Answer], scores: dict[tuple[str, str, str], float], others: Sequence[str]) -> NDArray[np.float64]:
    """What passing on would score: the mean of the best of the other models."""
    by_model = [[scores.get((name, one.group, one.id or one.prompt), np.nan) for one in mine] for name in others]
    known = [np.array(values) for values in by_model if not np.isnan(values).all()]
    if not known:
        return np.full(len(mine), 0.5)
    best = max(known, key=lambda values: float(np.nanmean(values)))
    return np.where(np.isnan(best), np.nanmean(best), best)


def _fit_one(model: str, mine: Sequence[Answer], right: NDArray[np.float64], passed_on: NDArray[np.float64]) -> Confident:
    inputs = np.array([[answer.confidence.get(name, 0.0) for name in NAMES] for answer in mine])
    chances = np.zeros(len(mine))
    for fold in make_folds([answer.id or answer.prompt for answer in mine]):
        weights, bias = logistic(inputs[fold.train], right[fold.train])
        chances[fold.held_out] = _sigmoid(inputs[fold.held_out] @ weights + bias)
    weights, bias = logistic(inputs, right)
    return Confident(
        model=model, weights=dict(zip(NAMES, weights.tolist(), strict=True)), bias=bias,
        threshold=best_threshold(chances, right, passed_on), low=float(np.quantile(chances, 0.05)), high=float(np.quantile(chances, 0.95)),
        num_answers=len(mine), auc=auc(chances, right),
    )  # fmt: skip


def best_threshold(chances: NDArray[np.float64], kept: NDArray[np.float64], passed_on: NDArray[np.float64]) -> float:
    """That gives the most right answers; of equal ones the lowest, which passes on the fewest."""
    order = np.argsort(chances, kind="stable")
    gains = np.concatenate(([0.0], np.cumsum((passed_on - kept)[order])))  # of passing on the first i
    place = int(np.argmax(gains))
    if place == 0:
        return 0.0
    return float(chances[order[place - 1]]) + 1e-9


def logistic(inputs: NDArray[np.float64], right: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """By Newton's method, with a penalty on standardized weights; returned for inputs as they are."""
    mean, deviation = inputs.mean(axis=0), inputs.std(axis=0) + 1e-9
    columns = np.concatenate([(inputs - mean) / deviation, np.ones((len(inputs), 1))], axis=1)
    penalty = np.diag([PENALTY] * inputs.shape[1] + [1e-6])
    weights = np.zeros(columns.shape[1])
    for _ in range(NUM_STEPS):
        chances = _sigmoid(columns @ weights)
        curvature = columns.T @ (columns * np.maximum(chances * (1 - chances), 1e-6)[:, None]) + penalty
        weights = weights + np.linalg.solve(curvature, columns.T @ (right - chances) - penalty @ weights)
    plain = weights[:-1] / deviation
    return plain, float(weights[-1] - plain @ mean)


def _sigmoid(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1.0 / (1.0 + np.exp(-np.clip(values, -50.0, 50.0)))


def auc(chances: NDArray[np.float64], right: NDArray[np.float64]) -> float:
    """That a right answer has the higher chance than a wrong one; ties count half."""
    ranks = np.empty(len(chances))
    values, which, counts = np.unique(chances, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks = (ends - (counts - 1) / 2)[which]
    positive = right > 0
    num, other = int(positive.sum()), int((~positive).sum())
    return float((ranks[positive].sum() - num * (num + 1) / 2) / (num * other)) if num and other and len(values) else 0.5
