"""Balancing layers over unlike stages."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.tasks.plan.inference.stages import balance

pytestmark = pytest.mark.pure


def test_even_stages() -> None:
    assert balance([1.0] * 8, [1.0, 1.0], [100.0, 100.0]) == ((0, 4), (4, 8))


def test_head_and_embedding_count() -> None:
    assert balance([1.0] * 8, [1.0, 1.0], [100.0, 100.0], first=2.0, last=0.0) == ((0, 3), (3, 8))


def test_quick_stages_get_more() -> None:
    assert balance([1.0] * 9, [2.0, 1.0], [100.0, 100.0]) == ((0, 6), (6, 9))


def test_room_binds_before_speed() -> None:
    assert balance([1.0] * 9, [2.0, 1.0], [4.0, 100.0]) == ((0, 4), (4, 9))


@given(
    layers=st.lists(st.floats(0.1, 10), min_size=4, max_size=40),
    speeds=st.lists(st.floats(0.5, 4), min_size=1, max_size=4),
)
def test_stages_partition_the_layers_and_no_neighbour_is_better(layers: list[float], speeds: list[float]) -> None:
    rooms = [1e9] * len(speeds)
    stages = balance(layers, speeds, rooms)
    assert stages[0][0] == 0 and stages[-1][1] == len(layers)
    assert all(one[1] == two[0] for one, two in pairwise(stages))
    assert all(stop > start for start, stop in stages)

    def slowest(bounds: list[tuple[int, int]]) -> float:
        return max(sum(layers[start:stop]) / speed for (start, stop), speed in zip(bounds, speeds, strict=True))

    best = slowest(list(stages))
    for index in range(len(stages) - 1):
        for step in (-1, 1):
            moved = [list(stage) for stage in stages]
            moved[index][1] += step
            moved[index + 1][0] += step
            if all(stop > start for start, stop in moved):
                assert slowest([(start, stop) for start, stop in moved]) >= best - 1e-6 * best
