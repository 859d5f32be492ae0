from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.runtime.engine.speculate.control import (
    FOLLOWING,
    LAST_PROBE,
    LOOKUP,
    PLAIN_EVERY,
    Acceptance,
    Control,
    StepCosts,
    after_step,
    as_ahead,
    begun,
    counts,
    is_measuring,
    new_control,
)

pytestmark = pytest.mark.pure


def costs(**seconds: float) -> StepCosts:
    return StepCosts(seconds=tuple((int(rows[1:]), value) for rows, value in seconds.items()))


@pytest.mark.parametrize(
    ("known", "rows", "seconds"),
    [
        (costs(r1=1.0), 1, 1.0),
        (costs(r1=1.0), 3, 1.4),  # guessed
        (costs(r1=1.0, r3=2.0), 2, 1.5),
        (costs(r1=1.0, r3=2.0), 5, 3.0),
        (costs(r1=1.0, r3=2.0, r5=2.2), 4, 2.1),
        (costs(r1=1.0, r3=0.9), 2, 1.0),  # never cheaper than without
        (costs(r3=1.0), 1, None),
    ],
)
def test_step_times_are_interpolated(known: StepCosts, rows: int, seconds: float | None) -> None:
    assert known.of(rows, 1) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    ("rate", "known", "expected"),
    [
        (0.9, costs(r1=1.0, r9=1.0), 8),  # rows are free
        (0.9, costs(r1=1.0, r9=9.0), 0),  # a row costs as much as a step
        (0.0, costs(r1=1.0, r9=1.0), 0),
        (0.5, costs(r1=1.0, r2=1.2), 1),
        (0.8, costs(r1=1.0, r2=1.2), 4),  # (1 + .8 + .64 + .51 + .41) / 1.8 is the most
        (0.8, costs(r1=1.0, r2=1.8), 0),
        (0.8, costs(r1=1.0, r2=1.6, r3=1.65, r9=9.0), 2),  # a second row is dear, a third is not
    ],
)
def test_as_many_as_pay(rate: float, known: StepCosts, expected: int) -> None:
    assert counts(Control(costs=known), [rate], 1) == (expected,)


def test_drafts_that_take_time_are_fewer() -> None:
    control = Control(costs=costs(r1=1.0, r9=1.4))
    assert counts(control, [0.8], 1) > counts(control, [0.8], 1, draft_seconds=0.2) > counts(control, [0.8], 1, draft_seconds=1.0)


def test_the_more_likely_ones_get_more() -> None:
    chosen = counts(Control(costs=costs(r3=1.0, r12=1.6)), [0.9, 0.3, 0.6], 3)
    assert chosen[0] > chosen[2] >= chosen[1]


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=6),
    st.dictionaries(st.integers(1, 20), st.floats(1e-6, 10), max_size=5),
    st.integers(0, 4),
    st.booleans(),
)
def test_never_more_than_allowed_and_never_an_error(rates: list[float], known: dict[int, float], others: int, auto: bool) -> None:
    control = Control(auto=auto, max_drafts=3, costs=StepCosts(seconds=tuple(sorted(known.items()))))
    chosen = counts(control, rates, len(rates) + others)
    assert len(chosen) == len(rates)
    assert all(0 <= count <= 3 for count in chosen)


def run(control: Control, steps: int, plain: float, each: float, rate: float) -> tuple[Control, float, int]:
    """Steps of one sequence, all drafts accepted up to their expectation; seconds, tokens."""
    seconds, tokens, carried = 0.0, 0, 0.0
    for _ in range(steps):
        (count,) = counts(control, [rate], 1)
        taken = plain + each * count
        carried += sum(rate**depth for depth in range(1, count + 1))
        accepted = min(int(carried), count)
        carried -= accepted
        control = after_step(control, rows=1 + count, sequences=1, seconds=taken, drafted=count, accepted=accepted, offered=True)
        seconds, tokens = seconds + taken, tokens + 1 + accepted
    return control, seconds, tokens


def test_where_it_does_not_pay_it_is_left_alone() -> None:
    control, seconds, tokens = run(Control(), 4000, plain=1.0, each=0.9, rate=0.5)
    assert seconds / tokens < 1.01
    assert control.probe_after == LAST_PROBE


def test_where_it_pays_it_is_used() -> None:
    _, seconds, tokens = run(Control(), 1000, plain=1.0, each=0.1, rate=0.8)
    assert tokens / seconds > 2.0


def test_it_notices_that_it_pays_again() -> None:
    control, _, _ = run(Control(), 500, plain=1.0, each=0.9, rate=0.3)
    assert control.probe_after > LOOKUP.first_probe
    control, _, _ = run(control, 1000, plain=1.0, each=0.05, rate=0.9)
    _, seconds, tokens = run(control, 200, plain=1.0, each=0.05, rate=0.9)
    assert tokens / seconds > 2.0


def test_a_plain_step_now_and_then_keeps_the_comparison_true() -> None:
    control = Control(costs=costs(r1=1.0, r9=1.0), busy_steps=PLAIN_EVERY)
    assert counts(control, [0.9], 1) == (0,)
    assert counts(Control(auto=False, costs=costs(r1=1.0, r9=9.0)), [0.5], 1) == (1,), "who asks for drafts gets one"


@given(st.floats(0, 1), st.floats(0, 64), st.integers(1, 8), st.integers(0, 8))
def test_rates_stay_rates(rate: float, weight: float, drafted: int, accepted: int) -> None:
    accepted = min(accepted, drafted)
    found = Acceptance(rate=rate, weight=weight, memory=64).judged(drafted, accepted)
    assert 0 <= found.rate <= 1
    assert found.rate >= rate if accepted == drafted else accepted > 0 or found.rate <= rate
    assert found.weight <= 64


def test_a_rate_is_the_mean_of_its_verdicts_until_it_forgets() -> None:
    found = Acceptance(rate=0.8, weight=2, memory=10)
    for accepted in (1, 0, 0, 1, 0, 0, 0, 1):
        found = found.judged(1, accepted)
    assert found.rate == pytest.approx((0.8 * 2 + 3) / 10)
    assert found.judged(1, 0).judged(1, 0).rate == pytest.approx(found.rate * (10 / 11) ** 2)


def test_one_step_that_is_slow_or_fast_says_little() -> None:
    known = costs()
    for _ in range(5):
        known = known.with_step(2, 4.2)
    for other in (80.0, 0.05):
        assert known.with_step(2, other).of(2, 2) == pytest.approx(4.2)
        assert known.with_step(2, other).with_step(2, 4.2).of(2, 2) == pytest.approx(4.2)


def test_a_first_step_that_is_slow_or_fast_is_soon_forgotten() -> None:
    for first, steps in ((80.0, 1), (0.05, 3)):
        known = costs().with_step(2, first)
        for _ in range(steps):
            known = known.with_step(2, 4.2)
        assert known.of(2, 2) == pytest.approx(4.2)


def test_one_slow_step_says_little_and_a_fast_one_much() -> None:
    known = costs(r1=1.0).with_step(2, 80.0)
    assert known.with_step(2, 1.5).of(2, 1) == 1.5
    assert known.with_step(2, 1.5).with_step(2, 80.0).of(2, 1) == pytest.approx(1.5 * 1.03)


def drafted(
    control: Control, sequence: Acceptance, is_followed: bool, chance: random.Random, rate: float
) -> tuple[Control, Acceptance, int, int, bool]:
    """What a step has: drafts, how many are accepted, and whether some were left out."""
    count = counts(control, [sequence.rate], 1)[0] if is_followed else 0
    left_out = not count and (not is_followed or not is_measuring(control, 1))
    accepted = int(count and chance.random() < rate)
    if count:
        sequence = sequence.judged(1, accepted)
        control = msgspec.structs.replace(control, acceptance=control.acceptance.judged(1, accepted))
    return control, sequence, count, accepted, left_out


def answered(
    control: Control, tokens: int, plain: float, each: float, chance: random.Random, rate: float
) -> tuple[Control, float]:
    """An answer for which a model may draft one token at a time, if it follows from the beginning; its seconds."""
    sequence, seconds, taken = control.of_sequence, 0.0, 0
    is_followed = control.idle_steps <= 1 or control.is_due
    control = begun(control) if is_followed and control.is_due else control
    while taken < tokens:
        is_followed = is_followed and control.idle_steps <= 1
        control, sequence, count, accepted, left_out = drafted(control, sequence, is_followed, chance, rate)
        took = plain + each * count
        control = after_step(
            control, rows=1 + count, sequences=1, seconds=took, drafted=count, accepted=accepted, offered=left_out
        )  # fmt: skip
        seconds, taken = seconds + took, taken + 1 + accepted
    return control, seconds


@pytest.mark.parametrize(
    ("rate", "least"), [(0.0, 0.995), (0.2, 0.995), (0.4, 0.995), (0.6, 1.02), (0.7, 1.11), (0.8, 1.18), (0.9, 1.25)]
)
def test_a_model_drafts_where_it_pays_and_costs_little_elsewhere(rate: float, least: float) -> None:
    """Steps as of GLM-4.5-Air on an H200: always drafting gives 1.07, 1.13, 1.2 and 1.27 times the speed at 0.6 and so on."""
    chance, control = random.Random(1), new_control(FOLLOWING, auto=True, max_drafts=1)
    seconds = 0.0
    for _ in range(12):
        control, took = answered(control, 512, 1.0, 0.5, chance, rate)
        seconds += took
    assert 12 * 512 / seconds > least


def answered_ahead(control: Control, tokens: int, waiting: float, chance: random.Random, rate: float) -> tuple[Control, float]:
    """As `answered`, on an H200: 2.8 ms a plain step, 4.2 with a draft, 0.9 more if it was not launched ahead, another 0.9 where the model follows.
    Steps differ by some percent, and one in fifty is slow. `waiting`: what is taken off the time of steps that were not launched ahead."""
    sequence, seconds, taken = control.of_sequence, 0.0, 0
    is_followed = control.idle_steps <= 1 or control.is_due
    control = begun(control) if is_followed and control.is_due else control
    ahead: int | None = None
    while taken < tokens:
        is_followed = is_followed and control.idle_steps <= 1
        control, sequence, count, accepted, left_out = drafted(control, sequence, is_followed, chance, rate)
        took = (4.2 if count else 2.8) * chance.gauss(1, 0.03) * (3 if chance.random() < 0.02 else 1) + 0.9 * (ahead != count)
        found = took if ahead == count else as_ahead(took, waiting)
        ahead = (None if control.is_plain_next else 1) if count else None if is_followed else 0
        control = after_step(
            control, rows=1 + count, sequences=1, seconds=found, drafted=count, accepted=accepted, offered=left_out
        )  # fmt: skip
        seconds, taken = seconds + took + 0.9 * (is_followed and not count), taken + 1 + accepted
    return control, seconds


def speed_ahead(rate: float, waiting: float, seed: int) -> float:
    """Against no drafts, of 12 answers of 512 tokens."""
    chance, control, seconds = random.Random(seed), new_control(FOLLOWING, auto=True, max_drafts=1), 0.0
    for _ in range(12):
        control, took = answered_ahead(control, 512, waiting, chance, rate)
        seconds += took
    return 12 * 512 * 2.8 * 1.04 / seconds


@pytest.mark.parametrize(
    ("rate", "least"), [(0.0, 0.99), (0.2, 0.99), (0.4, 0.985), (0.5, 0.98), (0.6, 1.02), (0.7, 1.11), (0.8, 1.18), (0.9, 1.25)]
)
def test_a_model_drafts_where_it_pays_beside_steps_that_are_launched_ahead(rate: float, least: float) -> None:
    assert sum(speed_ahead(rate, 0.9, seed) for seed in range(5)) / 5 > least


def test_a_model_is_tried_again_ever_more_rarely() -> None:
    chance, control = random.Random(1), new_control(FOLLOWING, auto=True, max_drafts=1)
    for _ in range(30):
        control, _ = answered(control, 512, 1.0, 0.9, chance, 0.3)
    assert control.probe_after == LAST_PROBE
    for _ in range(6):
        control, _ = answered(control, 512, 1.0, 0.2, chance, 0.8)
    assert control.probe_after == FOLLOWING.first_probe
    _, seconds = answered(control, 512, 1.0, 0.2, chance, 0.8)
    assert 512 / seconds > 1.4
