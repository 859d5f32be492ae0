"""How many experts of the next layer are guessed, and what that saves of a predicted step."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.tiers.guesses import (
    CARRIED_BYTES,
    GUESS_ROWS,
    GUESSED_RIGHT,
    MAX_GUESSES,
    ahead_slots,
    hidden_seconds,
    most_guesses,
)
from windlass.core.tiers.placement import EXCHANGE_SECONDS, predicted_seconds
from windlass.core.tiers.values import Demand, ExpertPool, Speeds, TierPlacement, Unit

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("rows", "in_host", "fetched", "expected"),
    [
        (1, 49, 6_100_000, 16),  # GLM-4.6: more than a row chooses
        (8, 49, 6_100_000, 3),
        (2, 100, 4_500_000, 3),
        (8, 100, 30_000_000, 1),
        (8, 49, 0, 16),  # the CPU alone
        (1, 5, 6_100_000, 2),
        (1, 1, 6_100_000, 0),
        (9, 49, 6_100_000, 0),
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


def test_no_more_is_hidden_than_is_read_or_idle() -> None:
    assert hidden_seconds(3.0, 1.0, 1) == hidden_seconds(1.0, 3.0, 8) == GUESSED_RIGHT
    assert hidden_seconds(3.0, 1.0, GUESS_ROWS + 1) == 0.0 == hidden_seconds(3.0, 1.0, 0)


def test_a_step_with_guesses_is_shorter_by_what_the_device_computes_meanwhile() -> None:
    """Ten layers that read 30 MB each of host memory at 100 GB/s, and 20 MB of the device's at 1 TB/s."""
    speeds = Speeds(host=50e9, link=50e9, disk=0.0, device=1e12)
    pool = ExpertPool(num_experts=1000, expert_bytes=10_000_000, touched=0.05, num_layers=10, rows=1.0)
    demand = Demand(units=(Unit(name="all", num_bytes=0),), experts=pool)
    placed = TierPlacement(num_experts=1000, expert_bytes=10_000_000, device_slots=400, host_slots=600, device_bytes=1)
    reading, computing, exchange = 3e-3, 0.2e-3, 10 * EXCHANGE_SECONDS
    assert predicted_seconds(demand, placed, speeds) == pytest.approx(
        computing + exchange + reading - GUESSED_RIGHT * (computing + exchange)
    )
    many = msgspec.structs.replace(demand, experts=msgspec.structs.replace(pool, rows=16.0))
    assert predicted_seconds(many, placed, speeds) == pytest.approx(computing + exchange + reading)
