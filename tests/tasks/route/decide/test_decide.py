from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.request import Constraint, Request
from windlass.errors import BadInput
from windlass.tasks.route.decide.checks import check_json, given_tests
from windlass.tasks.route.decide.confidence import agreement, chance, confidence_of, lowest_stretch
from windlass.tasks.route.decide.path import ALWAYS_BEST, ALWAYS_CHEAPEST, choose, walk
from windlass.tasks.route.decide.policy import Candidate, Policy, Situation, allowed_cost, decide, tolerance_for
from windlass.tasks.route.decide.router_file import PathPoint, decode_router
from windlass.tasks.route.decide.swaps import SHARE_OF_GAPS, Arrivals, Waiting, hold_seconds, mean_gap, next_request, simulate

pytestmark = pytest.mark.pure

SMALL = Candidate(name="small", chance=0.7, cost=1.0, seconds=0.5, grams=3.0)
LARGE = Candidate(name="large", chance=0.8, cost=10.0, seconds=3.0, grams=1.0)


def situation(policy: Policy = Policy(), tolerance: float = 0.05, **changes: object) -> Situation:  # noqa: B008 - frozen
    both = (SMALL, LARGE)
    return msgspec.structs.replace(Situation(candidates=both, best=1, tolerance=tolerance, policy=policy), **changes)


@pytest.mark.parametrize(
    ("made", "model", "says"),
    [
        (situation(tolerance=0.05), "large", "the best"),
        (situation(tolerance=0.15), "small", "0.10 below large, tolerance 0.15"),
        (situation(tolerance=ALWAYS_BEST), "large", "nothing cheaper"),
        (situation(tolerance=0.15, is_unlike=True), "large", "unlike the data"),
        (situation(Policy(kind="cheap"), is_unlike=True), "small", "cheapest"),
        (situation(Policy(kind="co2"), tolerance=0.15), "large", "the best"),
        (situation(Policy(kind="latency", max_seconds=1.0)), "small", "within 1 s"),
        (situation(Policy(kind="latency", max_seconds=9.0)), "large", "within 9 s"),
        (situation(Policy(kind="latency", max_seconds=0.1)), "small", "none answers within"),
    ],
)
def test_policies(made: Situation, model: str, says: str) -> None:
    found = decide(made)
    assert found.model == model and says in found.reason
    assert {found.model, *found.then} == {"small", "large"}


def test_a_model_whose_breaker_is_open_is_not_chosen() -> None:
    gone = (SMALL, msgspec.structs.replace(LARGE, is_available=False))
    assert decide(situation(candidates=gone)).model == "small"
    assert decide(situation(candidates=gone, is_unlike=True)).model == "small"
    both = tuple(msgspec.structs.replace(one, is_available=False) for one in gone)
    assert decide(situation(candidates=both)).model == "large"  # none is left: the best guess


def test_loading_is_part_of_the_price_and_of_the_time() -> None:
    out = msgspec.structs.replace(SMALL, is_loaded=False, load_cost=20.0, load_seconds=60.0)
    assert decide(situation(tolerance=0.15, candidates=(out, LARGE))).model == "large"
    assert decide(situation(Policy(kind="latency", max_seconds=5.0), candidates=(out, LARGE))).model == "large"


PATH = tuple(
    PathPoint(tolerance=t, score=s, cost=c)
    for t, s, c in ((-1.0, 0.80, 10.0), (0.0, 0.82, 6.0), (0.2, 0.75, 2.0), (1.0, 0.7, 1.0))
)


@pytest.mark.parametrize(("allowed", "tolerance"), [(20.0, 0.0), (6.0, 0.0), (3.0, 0.2), (0.5, ALWAYS_CHEAPEST)])
def test_a_budget_buys_the_best_mix_it_pays_for(allowed: float, tolerance: float) -> None:
    assert tolerance_for(Policy(kind="budget", usd_per_request=allowed), 0.1, PATH, allowed) == tolerance


def test_best_is_the_best_point_of_the_path() -> None:
    assert tolerance_for(Policy(kind="best"), 0.1, PATH, None) == 0.0 and tolerance_for(Policy(), 0.1, PATH, None) == 0.1


def test_a_months_budget_is_spread_over_what_is_still_to_come() -> None:
    month = Policy(kind="budget", usd_per_month=300.0)
    day = 86400.0
    even = allowed_cost(month, spent=10.0, num_requests=100, elapsed_seconds=day)
    assert even == pytest.approx(290.0 / 2900)
    assert allowed_cost(month, spent=300.0, num_requests=100, elapsed_seconds=day) == 0.0
    with pytest.raises(BadInput, match="usd_per_request or usd_per_month"):
        Policy(kind="budget")


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=30), st.integers(0, 2))
def test_the_path_goes_from_the_best_always_to_the_cheapest_always(rows: list[tuple[float, ...]], best: int) -> None:
    chances = np.array(rows)
    path = walk(chances, best)
    assert (path.choices[:, 0] == best).all() and (path.choices[:, -1] == 0).all()
    assert (np.diff(path.tolerances) >= 0).all()
    argmax = choose(chances, best, 0.0)
    assert np.allclose(chances[np.arange(len(chances)), argmax], chances.max(axis=1))


@given(st.tuples(st.floats(0, 1), st.floats(0, 1)), st.floats(-0.99, 1))
def test_one_decision_is_that_of_the_path(chances: tuple[float, float], tolerance: float) -> None:
    many = int(choose(np.array([chances]), 1, tolerance)[0])
    both = tuple(msgspec.structs.replace(one, chance=each) for one, each in zip((SMALL, LARGE), chances, strict=True))
    assert decide(situation(tolerance=tolerance, candidates=both)).model == both[many].name


# --- confidence and checks


def test_confidence_sees_the_lowest_stretch() -> None:
    sure, one_bad = [-0.01] * 20, [-0.01] * 10 + [-3.0] * 5 + [-0.01] * 10
    assert lowest_stretch(one_bad) == pytest.approx(-3.0) and lowest_stretch(sure) == pytest.approx(-0.01)
    assert confidence_of(one_bad)["stretch"] < confidence_of(sure)["stretch"] and confidence_of([]) == {}
    assert chance({"stretch": 2.0}, 1.0, confidence_of(sure)) > 0.5 > chance({"stretch": 2.0}, 1.0, confidence_of(one_bad))


@given(st.lists(st.floats(-20, 0), min_size=1, max_size=40))
def test_a_stretch_lies_between_the_lowest_token_and_the_mean_of_all(values: list[float]) -> None:
    found = lowest_stretch(values)
    assert min(values) - 1e-6 <= found <= max(values) + 1e-6


def test_samples_agree_blanks_and_case_aside() -> None:
    assert agreement(["Paris", " paris ", "London"]) == pytest.approx(2 / 3) and agreement([]) == 0.0


def test_json_and_given_tests() -> None:
    schema = Constraint(kind="json_schema", value='{"type": "object", "required": ["a"]}')
    asked = Request(prompt="x", constraint=schema)
    assert (
        check_json(asked, '{"a": 1}') == "passed"
        and check_json(asked, '{"b": 1}') == "failed"
        and check_json(asked, "no") == "failed"
    )
    assert check_json(Request(prompt="x"), "anything") == "none"
    code = Request(prompt="Write double.\nassert double(2) == 4\nassert double(0) == 0")
    found = given_tests(code, "Here:\n```python\ndef double(x):\n    return 2 * x\n```")
    assert found is not None and found.source.startswith("def double") and found.tests.count("assert") == 2
    assert given_tests(Request(prompt="Write double."), "def double(x): ...") is None


# --- swaps


def _trace(count: int = 500, seed: int = 0) -> list[Waiting]:
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(0.4, count))
    return [Waiting(number=i, model="ab"[int(random.random() < 0.4)], arrived=float(times[i])) for i in range(count)]


def test_swaps_are_shared_and_waiting_is_bounded() -> None:
    runs, loads = {"a": 0.2, "b": 0.3}, {"a": 4.0, "b": 4.0}
    first, ours = simulate(_trace(), runs, loads, None), simulate(_trace(), runs, loads, 20.0)
    assert ours.num_swaps <= 0.6 * first.num_swaps
    assert ours.max_wait < first.max_wait and ours.seconds < first.seconds


def test_an_idle_model_lingers_as_long_as_a_swap_takes() -> None:
    queue = [Waiting(number=0, model="b", arrived=1.0)]
    assert next_request(queue, "a", 3.0, 30.0, linger=4.0) is None and next_request(queue, "a", 5.0, 30.0, linger=4.0) is not None
    assert next_request(queue, None, 1.0, 30.0, linger=4.0) is not None
    arrivals = Arrivals()
    assert hold_seconds(queue, "a", arrivals, 4.0, 30.0) == 4.0 and hold_seconds(queue, None, arrivals, 4.0, 30.0) == 0.0
    for number in range(5):
        arrivals.add("a", 10.0 * number)
        arrivals.add("b", 20.0 * number)
    assert hold_seconds(queue, "a", arrivals, 4.0, 30.0) == pytest.approx(SHARE_OF_GAPS * 30.0 / math.log(2))
    assert hold_seconds(queue, "a", arrivals, 4.0, 9.0) == 9.0


@pytest.mark.parametrize("gap", [0.1, 0.4, 1.0, 4.0, 16.0])
def test_two_in_five_swaps_are_saved_however_rare_requests_are(gap: float) -> None:
    """Up to gaps of which a share is within the bound of waiting (decide/swaps.py has the formula)."""
    some = [Waiting(number=one.number, model=one.model, arrived=gap / 0.4 * one.arrived) for one in _trace()]
    runs, loads = {"a": 0.02, "b": 0.03}, {"a": 1.0, "b": 2.0}
    first, ours = simulate(some, runs, loads, None), simulate(some, runs, loads, 60.0)
    assert ours.num_swaps <= 0.6 * first.num_swaps
    assert ours.max_wait <= 60.0 + 2.0 + 10 * 0.03  # a load, and those that were let in before


def test_a_night_without_requests_does_not_change_the_usual_gap() -> None:
    usual = [float(number) for number in range(8)]
    assert mean_gap(usual) == mean_gap([*usual, 30_000.0]) == pytest.approx(1 / math.log(2))
    assert mean_gap(usual[:3]) is None


def test_who_has_waited_too_long_lets_no_others_pass() -> None:
    queue = [Waiting(number=0, model="b", arrived=0.0), Waiting(number=1, model="a", arrived=5.0)]
    early, late = next_request(queue, "a", 9.0, 10.0), next_request(queue, "a", 11.0, 10.0)
    assert early is not None and early.number == 1 and late is not None and late.number == 0
    assert next_request([], "a", 0.0, 1.0) is None


@given(st.integers(0, 50), st.floats(1.0, 30.0))
def test_everybody_is_served_once(seed: int, max_wait: float) -> None:
    some = _trace(40, seed)
    found = simulate(some, {"a": 0.1, "b": 0.1}, {"a": 1.0, "b": 2.0}, max_wait)
    assert found.num_swaps >= 1 and found.max_wait >= found.mean_wait >= 0


def test_a_damaged_router_is_refused() -> None:
    with pytest.raises(BadInput, match="is not a router"):
        decode_router(b"{}", "router.json")
