"""Energy of requests: the parts add up to the counter, whatever happens, and each request gets its share."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.hardware.attribution import EnergyLedger

pytestmark = pytest.mark.pure

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("work"), st.integers(0, 5), st.integers(1, 500)),
        st.tuples(st.just("settle"), st.floats(0, 1000), st.sampled_from(["idle", "busy", "loading"])),
        st.tuples(st.just("end"), st.integers(0, 5), st.just(0)),
    ),
    max_size=60,
)


@given(EVENTS)
def test_nothing_is_lost(events: list[tuple[str, float, object]]) -> None:
    ledger, counter = EnergyLedger(), 0.0
    for kind, first, second in events:
        if kind == "work":
            ledger.add_work(int(first), int(second))  # type: ignore[call-overload]
        elif kind == "settle":
            counter += first
            ledger.settle(first, is_loading=second == "loading", num_in_flight=int(second == "busy"))
        else:
            ledger.end(int(first), "m")
    assert ledger.total_joules == pytest.approx(counter)
    used = ledger.used("m") + sum(ledger.used(number) for number in range(6))
    assert used <= ledger.joules["requests"] + 1e-6


def test_shares_are_those_of_the_tokens() -> None:
    ledger = EnergyLedger()
    ledger.settle(100.0, is_loading=True, num_in_flight=0)
    ledger.settle(50.0, is_loading=False, num_in_flight=0)
    ledger.settle(30.0, is_loading=False, num_in_flight=1)  # a long prefill: nobody has a token yet
    ledger.add_work(1, 300)
    ledger.add_work(2, 100)
    ledger.settle(10.0, is_loading=False, num_in_flight=2)
    assert ledger.joules == {"loading": 100.0, "idle": 50.0, "requests": 40.0}
    ledger.end(1, "m")
    assert ledger.used("m") == 30.0 and ledger.used(1) == 0.0 and ledger.used(2) == 10.0
    ledger.add_work(2, 10)
    ledger.end(2, "m")  # before its last tokens were settled
    ledger.settle(5.0, is_loading=False, num_in_flight=0)
    assert ledger.used("m") == 45.0 and ledger.joules["requests"] == 45.0


def test_a_known_truth_is_found() -> None:
    """A machine of 100 W, 50 W more for every running request: shares of two requests that run one after the other, and together."""
    ledger, clock, true = EnergyLedger(), 0.0, {1: 0.0, 2: 0.0}
    spans = {1: (10.0, 40.0), 2: (30.0, 60.0)}
    total = 0.0
    while clock < 80:
        running = [number for number, (start, end) in spans.items() if start <= clock < end]
        joules = 0.5 * (100 + 50 * len(running))
        total += joules
        for number in running:
            ledger.add_work(number, 5)
            true[number] += joules / len(running)
        ledger.settle(joules, is_loading=False, num_in_flight=len(running))
        clock += 0.5
    used = {number: ledger.used(number) for number in spans}
    assert used == pytest.approx(true) and ledger.total_joules == pytest.approx(total)
    assert sum(used.values()) + ledger.joules["idle"] + ledger.joules["loading"] == pytest.approx(total, rel=0.01)
