"""Which experts change places."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.tiers.swaps import SIGNIFICANT, Swap, choose_swaps, decayed

pytestmark = [pytest.mark.pure, pytest.mark.quick]


@pytest.mark.parametrize(
    ("scores", "on_device", "expected"),
    [
        ([[0.0, 100.0]], [[True, False]], [Swap(0, 1, 0)]),
        ([[100.0, 0.0]], [[True, False]], []),
        ([[100.0, 110.0]], [[True, False]], []),  # chance
        ([[0.0, 50.0, 90.0, 10.0]], [[True, False, False, True]], [Swap(0, 2, 0)]),
        ([[0.0, 50.0], [0.0, 90.0]], [[True, False]] * 2, [Swap(1, 1, 0), Swap(0, 1, 0)]),
        ([[0.0, 50.0]], [[False, False]], []),
        ([[0.0, 50.0]], [[True, True]], []),
        ([], [], []),
    ],
)
def test_swaps(scores: list[list[float]], on_device: list[list[bool]], expected: list[Swap]) -> None:
    assert choose_swaps(scores, on_device, limit=4) == expected


numbers = st.integers(0, 1000)
layers = st.integers(2, 6).flatmap(
    lambda n: st.lists(
        st.tuples(st.lists(numbers, min_size=n, max_size=n), st.lists(st.booleans(), min_size=n, max_size=n)), max_size=4
    )
)


@given(layers, st.integers(0, 3))
def test_every_swap_gains(found: list[tuple[list[int], list[bool]]], limit: int) -> None:
    scores, here = [[float(n) for n in uses] for uses, _ in found], [places for _, places in found]
    swaps = choose_swaps(scores, here, limit)
    assert len(swaps) <= limit and len({swap.layer for swap in swaps}) == len(swaps)
    for layer, promoted, demoted in swaps:
        assert here[layer][demoted] and not here[layer][promoted]
        more, less = scores[layer][promoted], scores[layer][demoted]
        assert more - less > SIGNIFICANT * (more + less) ** 0.5


def test_older_counts_weigh_less() -> None:
    assert decayed([[10.0, 0.0]], [[1, 2]]) == [[9.0, 2.0]]
