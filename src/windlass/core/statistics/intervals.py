"""Intervals, pass@k and paired comparisons. Pure; no numpy, so that reports are made wherever Windlass runs.

Sources: Wilson (1927) for shares; clustered standard errors as in arXiv 2411.00640, section 3.1, with the factor G/(G-1); pass@k unbiased
(arXiv 2107.03374, equation 1); McNemar's exact test; Student's t by the Cornish-Fisher expansion (Abramowitz and Stegun 26.7.5).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from random import Random
from statistics import NormalDist, fmean

from windlass.core.model import Frozen

Interval = tuple[float, float]
Z = NormalDist().inv_cdf(0.975)
POWER_Z = NormalDist().inv_cdf(0.8)
NUM_RESAMPLES = 2000
NO_SPREAD = 1e-12
"""A standard error below this is rounding."""
MAX_RESAMPLED = 3000
"""Above this many questions the mean of differences is normal enough, and resampling in Python too slow."""


def wilson(num_correct: float, num_total: int) -> Interval:
    if num_total == 0:
        return 0.0, 1.0
    share, spread = num_correct / num_total, Z * Z / num_total
    middle = share + spread / 2
    half = Z * math.sqrt(share * (1 - share) / num_total + spread / (4 * num_total))
    low, high = (middle - half) / (1 + spread), (middle + half) / (1 + spread)
    return max(min(low, share), 0.0), min(max(high, share), 1.0)  # rounding must not push the share out


def t_quantile(freedom: int) -> float:
    """Of 97.5 %."""
    if freedom < 3:
        return {1: 12.706, 2: 4.303}.get(freedom, math.inf)
    z, v = Z, float(freedom)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / v + second / v**2 + third / v**3


def clustered_error(values: Sequence[float], clusters: Sequence[Hashable]) -> float | None:
    """Standard error of the mean where values of a cluster are not independent. None: fewer than two clusters."""
    mean, residuals = fmean(values), defaultdict[Hashable, float](float)
    for value, cluster in zip(values, clusters, strict=True):
        residuals[cluster] += value - mean
    count = len(residuals)
    if count < 2:
        return None
    return math.sqrt(count / (count - 1) * sum(residual**2 for residual in residuals.values())) / len(values)


def clustered(values: Sequence[float], clusters: Sequence[Hashable]) -> Interval | None:
    error = clustered_error(values, clusters)
    if error is None:
        return None
    if error < NO_SPREAD:  # all clusters alike: that says as much as so many single answers would
        return wilson(fmean(values) * len(set(clusters)), len(set(clusters)))
    half, mean = t_quantile(len(set(clusters)) - 1) * error, fmean(values)
    return max(mean - half, 0.0), min(mean + half, 1.0)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that one of k samples, drawn of those there are, is correct."""
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_correct + 1, num_samples + 1))


def mcnemar(num_only_a: int, num_only_b: int) -> float:
    """Two-sided exact p: under no difference, each question that one alone got right is a coin's toss."""
    total, fewer = num_only_a + num_only_b, min(num_only_a, num_only_b)
    if total == 0:
        return 1.0
    if total > 1000:  # exact sums of huge binomials gain nothing
        return min(2 * (1 - NormalDist().cdf((abs(num_only_a - num_only_b) - 1) / math.sqrt(total))), 1.0)
    return min(2 * sum(math.comb(total, i) for i in range(fewer + 1)) / 2**total, 1.0)


class Difference(Frozen):
    """Of b over a, on the same questions."""

    num_questions: int
    difference: float
    interval: Interval
    p: float
    smallest_detectable: float
    """A true difference of this size would be seen in four of five such evaluations (80 % power at 5 %)."""


def paired(a: Sequence[float], b: Sequence[float], clusters: Sequence[Hashable] | None = None) -> Difference:
    """`a`, `b`: scores in the same order, 0 or 1, or means of samples. `clusters`: questions that share a source."""
    differences = [right - left for left, right in zip(a, b, strict=True)]
    mean, groups = fmean(differences), list(clusters) if clusters else list(range(len(a)))
    error = clustered_error(differences, groups) or 0.0
    if error < NO_SPREAD:
        return _all_alike(len(a), mean, len(set(groups)))
    is_binary = all(value in (0.0, 1.0) for value in (*a, *b))
    is_clustered = len(set(groups)) < len(groups)
    if is_binary and not is_clustered:
        p = mcnemar(sum(d < 0 for d in differences), sum(d > 0 for d in differences))
    else:
        p = _normal_p(mean, error)
    interval = _normal_interval(mean, error, len(set(groups)))
    if not is_clustered and len(differences) <= MAX_RESAMPLED:
        interval = bootstrap(differences)
    detectable = (Z + POWER_Z) * error
    return Difference(num_questions=len(a), difference=mean, interval=interval, p=p, smallest_detectable=detectable)


def _all_alike(num_questions: int, mean: float, num_groups: int) -> Difference:
    """No group differs from another, so there is no spread to go by.

    What was not seen in n groups happens, with 95 % confidence, in less than 1 - 0.05^(1/n) of them; p is a sign test's.
    """
    bound = 1 - 0.05 ** (1 / num_groups)
    p = 1.0 if abs(mean) < NO_SPREAD else mcnemar(0, num_groups)
    interval = max(mean - bound, -1.0), min(mean + bound, 1.0)
    return Difference(num_questions=num_questions, difference=mean, interval=interval, p=p, smallest_detectable=bound)


def bootstrap(differences: Sequence[float], seed: int = 0) -> Interval:
    """Percentiles of the mean over resampled questions."""
    random, count = Random(seed), len(differences)
    means = sorted(sum(random.choices(differences, k=count)) / count for _ in range(NUM_RESAMPLES))
    return means[int(0.025 * NUM_RESAMPLES)], means[int(0.975 * NUM_RESAMPLES) - 1]


def _normal_p(mean: float, error: float) -> float:
    return 2 * (1 - NormalDist().cdf(abs(mean) / error))


def _normal_interval(mean: float, error: float, num_clusters: int) -> Interval:
    half = (t_quantile(num_clusters - 1) if num_clusters > 1 else 0.0) * error
    return mean - half, mean + half


def decimals(half_width: float) -> int:
    """Of a percentage that is certain to this half width (0.07: 7 points): digits that would be noise are not shown."""
    points = 100 * half_width
    return 0 if points >= 1 or points <= 0 else min(math.ceil(-math.log10(points)), 2)


def show_percent(share: float, interval: Interval) -> str:
    digits = decimals((interval[1] - interval[0]) / 2)
    return f"{100 * share:.{digits}f} %"


def show_interval(interval: Interval) -> str:
    digits = decimals((interval[1] - interval[0]) / 2)
    return f"{100 * interval[0]:.{digits}f} to {100 * interval[1]:.{digits}f}"


def show_points(difference: float, interval: Interval) -> str:
    digits = decimals((interval[1] - interval[0]) / 2)
    return f"{100 * difference:+.{digits}f}"
