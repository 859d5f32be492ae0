"""How sure a model was of its own answer, from the log-probabilities of its tokens. Pure.

A sum or mean alone is biased by length; quantiles of token probabilities with a learned rule do better (arXiv 2404.10136). So several
numbers are kept, and a logistic rule over them is fitted where answers have them (`fit/confident.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

STRETCH = 5
"""Tokens of the lowest stretch: long enough that one odd token is no alarm, short enough to see one wrong number."""
NAMES = ("mean", "lowest", "first", "quantile", "stretch", "tokens")


def confidence_of(logprobs: Sequence[float]) -> dict[str, float]:
    """Empty for an answer without log-probabilities."""
    known = [max(value, -20.0) for value in logprobs if math.isfinite(value)]
    if not known:
        return {}
    ordered = sorted(known)
    return {
        "mean": sum(known) / len(known),
        "lowest": ordered[0],
        "first": known[0],
        "quantile": ordered[len(ordered) // 10],
        "stretch": lowest_stretch(known),
        "tokens": math.log(len(known)),
    }


def lowest_stretch(values: Sequence[float], length: int = STRETCH) -> float:
    """The lowest mean of so many tokens in a row."""
    size = min(length, len(values))
    total = lowest = sum(values[:size])
    for place in range(size, len(values)):
        total += values[place] - values[place - size]
        lowest = min(lowest, total)
    return lowest / size


def agreement(answers: Sequence[str]) -> float:
    """Of several samples: the share that gives the commonest answer, blanks and case aside."""
    if not answers:
        return 0.0
    return Counter(" ".join(answer.lower().split()) for answer in answers).most_common(1)[0][1] / len(answers)


def chance(weights: Mapping[str, float], bias: float, found: Mapping[str, float]) -> float:
    """Of being right, by a logistic rule."""
    total = bias + sum(weight * found.get(name, 0.0) for name, weight in weights.items())
    return 1.0 / (1.0 + math.exp(-max(min(total, 50.0), -50.0)))
