"""Who is let in, and when the others should come again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.tasks.serve.backend.admission import MAX_RETRY_SECONDS, MIN_RETRY_SECONDS, Load, admit

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("in_flight", "asked", "admitted", "never"),
    [
        (0, 1, True, False),
        (7, 1, True, False),
        (11, 1, True, False),
        (12, 1, False, False),
        (11, 2, False, False),
        (10, 2, True, False),
        (0, 12, True, False),
        (0, 13, False, True),
    ],
)
def test_so_many_run_and_so_many_wait(in_flight: int, asked: int, admitted: bool, never: bool) -> None:
    verdict = admit(Load(in_flight=in_flight, max_running=8, max_waiting=4), asked)
    assert (verdict.admitted, verdict.is_impossible) == (admitted, never)


def test_without_a_queue_only_those_that_run_are_let_in() -> None:
    assert admit(Load(in_flight=7, max_running=8, max_waiting=0), 1).admitted
    assert not admit(Load(in_flight=8, max_running=8, max_waiting=0), 1).admitted


@pytest.mark.parametrize(("mean_seconds", "asked", "expected"), [(0.01, 1, 1), (10.0, 1, 2), (10.0, 8, 10), (1000.0, 8, 60)])
def test_when_to_come_again_follows_how_long_answers_take(mean_seconds: float, asked: int, expected: int) -> None:
    load = Load(in_flight=12, max_running=8, max_waiting=4, mean_seconds=mean_seconds)
    assert admit(load, asked).retry_seconds == expected


@given(st.integers(0, 300), st.integers(1, 64), st.integers(0, 128), st.integers(1, 300), st.floats(0, 1e4))
def test_never_more_than_there_is_room_for(in_flight: int, running: int, waiting: int, asked: int, each: float) -> None:
    load = Load(in_flight=in_flight, max_running=running, max_waiting=waiting, mean_seconds=each)
    verdict = admit(load, asked)
    assert verdict.admitted == (in_flight + asked <= running + waiting)
    assert verdict.is_impossible == (asked > running + waiting)
    if not verdict.admitted and not verdict.is_impossible:
        assert MIN_RETRY_SECONDS <= verdict.retry_seconds <= MAX_RETRY_SECONDS


def test_one_share_cannot_take_the_whole_queue() -> None:
    """Ten places, filled by one key: another gets its half, a third a third; the first gets nothing more."""
    full = {"in_flight": 10, "max_running": 2, "max_waiting": 8}
    assert not admit(Load(**full, own=10, num_shares=1), 1).admitted
    assert not admit(Load(**full, own=10, num_shares=2), 1).admitted
    assert admit(Load(**full, own=0, num_shares=2), 5).admitted
    assert not admit(Load(**full, own=0, num_shares=2), 6).admitted
    assert not admit(Load(**full, own=0, num_shares=2), 6).is_impossible


@given(places=st.integers(1, 30), keys=st.integers(1, 6), arrivals=st.lists(st.integers(0, 5), max_size=120))
def test_there_are_never_more_than_twice_as_many(places: int, keys: int, arrivals: list[int]) -> None:
    own = [0] * keys
    for key in (arrival % keys for arrival in arrivals):
        shares = sum(count > 0 for place, count in enumerate(own) if place != key) + 1
        load = Load(in_flight=sum(own), max_running=1, max_waiting=places - 1, own=own[key], num_shares=shares)
        result = admit(load, 1)
        if own[key] + 1 <= load.fair_share and shares > 1 and sum(own) < 2 * places:
            assert result.admitted, "within its share"
        own[key] += result.admitted
    assert sum(own) <= 2 * places
