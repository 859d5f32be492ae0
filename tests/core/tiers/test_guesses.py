"""How many experts of the next layer are guessed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.tiers.guesses import CARRIED_BYTES, GUESS_ROWS, MAX_GUESSES, ahead_slots, most_guesses

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("rows", "in_host", "fetched", "expected"),
    [
        (1, 49, 6_100_000, 16),  # GLM-4.6: more than a row chooses
        (4, 49, 6_100_000, 3),
        (2, 100, 4_500_000, 3),
        (4, 100, 30_000_000, 1),
        (4, 49, 0, 16),  # the CPU alone
        (1, 5, 6_100_000, 2),
        (1, 1, 6_100_000, 0),
        (5, 49, 6_100_000, 0),
        (64, 49, 6_100_000, 0),
    ],
)
def test_how_many(rows: int, in_host: int, fetched: int, expected: int) -> None:
    assert most_guesses(rows, in_host, fetched) == expected


@given(st.integers(1, 64), st.integers(0, 600), st.integers(0, 10**8))
def test_guesses_of_two_layers_have_room(rows: int, in_host: int, fetched: int) -> None:
    """Half of the staging slots, which there are twice as many of as experts in host memory; and what is fetched is over soon."""
    most = most_guesses(rows, in_host, fetched)
    assert 0 <= most <= ahead_slots(in_host) <= MAX_GUESSES and 2 * ahead_slots(in_host) <= in_host
    assert rows == 1 or (most - 1) * fetched < CARRIED_BYTES or not most
    assert rows <= GUESS_ROWS or not most
