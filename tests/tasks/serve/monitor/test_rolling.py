"""Rates and percentiles of the last seconds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.tasks.serve.monitor.rolling import MAX_VALUES, SECONDS, RollingRate, RollingValues

pytestmark = pytest.mark.pure


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.5, 51.0), (0.95, 96.0), (1.0, 100.0)])
def test_percentiles(share: float, expected: float) -> None:
    recent = RollingValues(Clock())
    for value in range(100, 0, -1):
        recent.add(value)
    assert recent.percentile(share) == expected


def test_old_values_do_not_count() -> None:
    clock = Clock()
    recent = RollingValues(clock)
    assert recent.percentile(0.5) is None
    recent.add(1.0)
    clock.now += SECONDS + 1
    assert recent.percentile(0.5) is None
    recent.add(2.0)
    assert recent.percentile(0.5) == 2.0


def test_memory_is_bounded() -> None:
    recent = RollingValues(Clock())
    for value in range(3 * MAX_VALUES):
        recent.add(value)
    assert recent.percentile(0.0) == 2 * MAX_VALUES


def test_a_rate_rises_and_falls_to_nothing() -> None:
    clock = Clock()
    rate = RollingRate(clock)
    assert rate.per_second == 0
    for _ in range(100):
        clock.now += 0.1
        rate.add(5)
    assert rate.per_second == pytest.approx(50, rel=0.15)
    clock.now += 10
    assert rate.per_second == 0


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 1000)), max_size=50))
def test_a_rate_is_never_more_than_all_of_it_at_once(steps: list[tuple[float, int]]) -> None:
    clock = Clock()
    rate = RollingRate(clock)
    for seconds, count in steps:
        clock.now += seconds
        rate.add(count)
    assert 0 <= rate.per_second <= sum(count for _, count in steps) / RollingRate.BUCKET_SECONDS
