"""Intervals against published values, pass@k against counting, comparisons against what was measured on a published table."""

from __future__ import annotations

import math
from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.statistics.intervals import (
    bootstrap,
    clustered,
    clustered_error,
    decimals,
    mcnemar,
    paired,
    pass_at_k,
    show_interval,
    show_percent,
    t_quantile,
    wilson,
)

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_as_published(right: int, total: int, low: float, high: float) -> None:
    """Newcombe, Statistics in Medicine 17 (1998) 857, table I, method 3."""
    assert wilson(right, total) == pytest.approx((low, high), abs=1e-4)


@given(st.integers(0, 400), st.integers(1, 400))
def test_an_interval_holds_its_share(right: int, total: int) -> None:
    right = min(right, total)
    low, high = wilson(right, total)
    assert 0 <= low <= right / total <= high <= 1


def test_no_answers_are_no_knowledge() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("freedom", "value"), [(1, 12.706), (2, 4.303), (3, 3.182), (10, 2.228), (30, 2.042), (1000, 1.962)])
def test_students_t(freedom: int, value: float) -> None:
    assert t_quantile(freedom) == pytest.approx(value, rel=0.01)


def test_clusters_of_one_are_the_usual_error() -> None:
    values = [float(Random(0).random() < 0.3) for _ in range(50)] + [1.0, 0.0, 1.0]
    mean = sum(values) / len(values)
    usual = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))
    assert clustered_error(values, range(len(values))) == pytest.approx(usual)


def test_clusters_that_agree_count_once() -> None:
    values = [1.0] * 50 + [0.0] * 50
    together = clustered_error(values, ["a"] * 50 + ["b"] * 50)
    assert together == pytest.approx(0.5) and clustered(values, ["a"] * 50 + ["b"] * 50) == (0.0, 1.0)
    assert clustered_error(values, ["a"] * 100) is None


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_what_counting_says(samples: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    outcomes = [True] * right + [False] * (samples - right)
    drawn = list(combinations(outcomes, k))
    assert pass_at_k(samples, right, k) == pytest.approx(sum(any(some) for some in drawn) / len(drawn))


@pytest.mark.parametrize(
    ("only_a", "only_b", "p"), [(0, 0, 1.0), (5, 5, 1.0), (0, 6, 0.03125), (1, 9, 0.021484375), (10, 20, 0.0987)]
)
def test_mcnemar(only_a: int, only_b: int, p: float) -> None:
    assert mcnemar(only_a, only_b) == pytest.approx(p, abs=1e-4) == mcnemar(only_b, only_a)


def test_mcnemar_of_many_agrees_with_few() -> None:
    exact = sum(math.comb(1000, i) for i in range(461)) / 2**1000 * 2
    assert mcnemar(460, 540) == pytest.approx(exact, rel=1e-6)
    assert mcnemar(461, 540) == pytest.approx(exact, rel=0.15)  # one more, and it is a normal's


def test_a_comparison_is_paired() -> None:
    """Two models that are right on the same questions differ less uncertainly than two that are not."""
    random = Random(1)
    a = [float(random.random() < 0.6) for _ in range(500)]
    alike = [value if random.random() < 0.95 else 1.0 for value in a]
    unlike = [float(random.random() < 0.62) for _ in a]
    close, far = paired(a, alike), paired(a, unlike)
    assert close.smallest_detectable < far.smallest_detectable / 2
    assert close.p < 0.01 and close.interval[0] > 0 and close.interval[0] < close.difference < close.interval[1]


def test_no_difference_is_none() -> None:
    found, bound = paired([1.0, 0.0] * 20, [1.0, 0.0] * 20), 1 - 0.05 ** (1 / 40)
    assert (found.difference, found.interval, found.p, found.smallest_detectable) == (0.0, (-bound, bound), 1.0, bound)
    assert paired([0.0] * 40, [0.0] * 40).interval[1] == pytest.approx(3 / 40, rel=0.05)  # the rule of three


@pytest.mark.parametrize(("count", "p"), [(1, 1.0), (3, 0.25), (10, 2 / 2**10)])
def test_a_few_questions_that_all_differ_alike_are_no_certainty(count: int, p: float) -> None:
    for found in (
        paired([0.0] * count, [1.0] * count),
        paired([0.0] * count * 2, [1.0] * count * 2, [*range(count)] * 2),
        paired([0.0] * count, [0.3] * count),
    ):
        assert found.p == pytest.approx(p) and found.interval[1] - found.interval[0] >= 1 - 0.05 ** (1 / count)


@pytest.mark.parametrize(("values", "share"), [([0.0] * 20, 0.0), ([1.0] * 20, 1.0), ([1.0, 0.0] * 10, 0.5)])
def test_clusters_all_alike_have_an_interval(values: list[float], share: float) -> None:
    low, high = clustered(values, [place // 2 for place in range(20)]) or (9.0, 9.0)
    assert (low, high) == wilson(round(10 * share), 10) and low <= share <= high and high - low > 0.2


@given(st.integers(0, 3000), st.integers(0, 3000))
def test_a_p_is_a_probability(only_a: int, only_b: int) -> None:
    assert 0 <= mcnemar(only_a, only_b) <= 1 == mcnemar(only_a, only_a)


def test_means_of_samples_are_compared_too() -> None:
    found = paired([0.2, 0.4, 0.6, 0.3] * 10, [0.4, 0.6, 0.8, 0.5] * 10)
    assert found.difference == pytest.approx(0.2) and found.p < 0.001


def test_resampling_is_the_same_every_time() -> None:
    differences = [1.0, 0.0, 0.0, -1.0] * 25
    assert bootstrap(differences) == bootstrap(differences) != bootstrap(differences, seed=1)


@pytest.mark.parametrize(("half", "digits"), [(0.2, 0), (0.07, 0), (0.012, 0), (0.0099, 1), (0.005, 1), (0.0005, 2), (0.0, 0)])
def test_digits_that_are_noise_are_not_shown(half: float, digits: int) -> None:
    assert decimals(half) == digits


def test_how_shares_are_shown() -> None:
    assert show_percent(0.6234, wilson(102, 164)) == "62 %" and show_interval(wilson(102, 164)) == "55 to 69"
    assert show_percent(0.6234, wilson(8754, 14042)) == "62.3 %"
