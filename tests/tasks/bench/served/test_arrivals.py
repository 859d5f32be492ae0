"""Poisson arrivals: reproducible, in order, at the rate."""

from __future__ import annotations

import math
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.tasks.bench.served.arrivals import poisson, schedule

pytestmark = pytest.mark.pure


@given(st.floats(0.01, 1000), st.text(max_size=5), st.integers(0, 50), st.floats(0.001, 100))
def test_the_same_seed_arrives_alike(rate: float, seed: str, count: int, faster: float) -> None:
    found = list(schedule(rate, seed, count, None))
    assert found == list(islice(poisson(rate, seed), count)) and len(found) == count
    assert all(0 < before <= after for before, after in pairwise(found))
    for one, other in zip(found, schedule(rate * faster, seed, count, None), strict=True):
        assert math.isclose(one, other * faster, rel_tol=1e-9), "another rate is another unit of time"


@given(st.floats(1, 50), st.floats(0.1, 5))
def test_until_a_time(rate: float, seconds: float) -> None:
    found = list(schedule(rate, "s", None, seconds))
    following = next(islice(poisson(rate, "s"), len(found), None))
    assert all(arrival <= seconds for arrival in found) and following > seconds


def test_the_rate_is_kept() -> None:
    """Of 20,000 gaps the mean is within five standard errors of 1 / rate, and their spread is that of an exponential."""
    found = [0.0, *schedule(4.0, "0", 20_000, None)]
    gaps = [after - before for before, after in pairwise(found)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert abs(mean - 0.25) < 5 * 0.25 / math.sqrt(len(gaps)) and abs(spread / mean - 1) < 0.05
    assert list(schedule(4.0, "0", 3, None)) != list(schedule(4.0, "1", 3, None))
