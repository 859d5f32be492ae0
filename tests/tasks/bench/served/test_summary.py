"""Percentiles, the steady window, throughput and goodput, on times that the tests make up."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.tasks.bench.served.load import Load
from windlass.tasks.bench.served.record import EngineSteps, LoadRun, RequestRecord
from windlass.tasks.bench.served.summary import Limits, percentile, percentiles, steady_window, summarize

pytestmark = pytest.mark.pure

LOAD = Load(at_once=1, prompt_tokens=8, new_tokens=4, requests=4)
NONE = Limits()


def answered(sent: float, first: float, gap: float, tokens: int = 4, **more: int) -> RequestRecord:
    times = tuple(sent + first + gap * number for number in range(tokens))
    return RequestRecord(sent=sent, ended=times[-1], times=times, **{"completion_tokens": tokens, "prompt_tokens": 8, **more})


def failed(sent: float, error: str = "429 full") -> RequestRecord:
    return RequestRecord(sent=sent, ended=sent, error=error, status=429)


def run(records: Sequence[RequestRecord], load: Load = LOAD, cpu: float = 0.0) -> LoadRun:
    began = min(record.sent for record in records)
    return LoadRun(
        load=load, began=began, ended=max(one.ended for one in records), records=tuple(records), client_cpu_seconds=cpu
    )


def loop(users: int, turns: int, first: float, gap: float, tokens: int = 4) -> list[RequestRecord]:
    """Users in step: each turn takes as long."""
    length = first + gap * (tokens - 1)
    return [answered(turn * length, first, gap, tokens) for turn in range(turns) for _ in range(users)]


# --- percentiles


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([5.0], 0.99, 5.0), ([1.0, 2.0], 0.5, 1.5), ([1.0, 2.0, 3.0, 4.0, 5.0], 0.9, 4.6), ([0.0, 10.0], 0.99, 9.9)],
)
def test_percentile(values: list[float], share: float, expected: float) -> None:
    assert math.isclose(percentile(values, share), expected)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=60))
def test_percentiles_are_those_of_the_standard_library(values: list[float]) -> None:
    found, cuts = percentiles(values), statistics.quantiles(values, n=100, method="inclusive")
    assert found is not None
    for mine, theirs in ((found.p50, cuts[49]), (found.p90, cuts[89]), (found.p99, cuts[98])):
        assert math.isclose(mine, theirs, rel_tol=1e-9, abs_tol=1e-6)
    assert min(values) <= found.p50 <= found.p90 <= found.p99 <= found.largest == max(values)


def test_percentiles_of_nothing() -> None:
    assert percentiles([]) is None


# --- the steady window


def test_one_user_is_counted_in_whole_turns() -> None:
    """A turn: the first token after 7 s, then three more, one a second: four tokens in 10 s."""
    records = loop(users=1, turns=5, first=7, gap=1)
    assert steady_window(records) == (10, 40)
    found = summarize([run(records)], NONE)
    assert found.is_steady and found.window_seconds == 30
    assert found.output_tokens_per_second == pytest.approx(0.4) and found.requests_per_second == pytest.approx(0.1)
    assert found.whole_tokens_per_second == pytest.approx(20 / 50)


def test_users_in_step_are_counted_in_whole_turns() -> None:
    """All answers end at the window's edges; neither side may be counted twice."""
    found = summarize([run(loop(users=64, turns=4, first=7, gap=1))], NONE)
    assert found.output_tokens_per_second == pytest.approx(64 * 0.4) and found.requests_per_second == pytest.approx(6.4)


def test_users_nearly_in_step_are_counted_right() -> None:
    """A millisecond apart, all of the first turn's answers but one end just within the window: counted whole, they would make 9.5 a
    second of 6.4."""
    records = [answered(10 * turn + user / 1000, 5.05, 0.05, tokens=100) for turn in range(4) for user in range(64)]
    window = steady_window(records)
    assert window is not None
    begin, end = window
    assert sum(begin < record.ended <= end for record in records) / (end - begin) == pytest.approx(9.5, rel=0.01)
    found = summarize([run(records)], NONE)
    assert found.requests_per_second == pytest.approx(6.4, rel=0.01) and found.output_tokens_per_second == pytest.approx(
        640, rel=0.01
    )


def test_a_slow_end_does_not_count() -> None:
    """The last request is alone for a hundred seconds."""
    records = [*loop(users=2, turns=4, first=1, gap=1), answered(16, 101, 1)]
    found = summarize([run(records)], NONE)
    assert steady_window(records) == (4, 16) and found.output_tokens_per_second == pytest.approx(2.0)
    assert found.whole_tokens_per_second < 0.5


def test_too_few_requests_have_no_steady_window() -> None:
    found = summarize([run(loop(users=3, turns=1, first=1, gap=1))], NONE)
    assert not found.is_steady and found.output_tokens_per_second == found.whole_tokens_per_second == pytest.approx(3.0)


def test_two_requests_of_users_in_step_have_no_steady_window() -> None:
    """The window would be the moment in which the first answers end and the second requests are sent."""
    records = [answered(10 * turn + user, 9.45, 0.05, tokens=2) for turn in range(2) for user in (0, 0.6)]
    assert max(record.sent for record in records) > min(record.ended for record in records)
    assert steady_window(records) is None


def test_where_nothing_is_answered_there_are_no_numbers() -> None:
    found = summarize([run([failed(0), failed(1), failed(1, "connection lost")])], Limits(first_token_seconds=1))
    assert found.errors == {"429 full": 2, "connection lost": 1} and found.requests == 3 and found.answered == 0
    assert found.first_token is None and found.between_tokens is None and found.end_to_end is None
    assert found.output_tokens_per_second == found.goodput_per_second == found.within_limits == 0 and not found.is_steady


def test_failed_requests_are_counted_and_their_tokens_are_not() -> None:
    whole = loop(users=1, turns=4, first=1, gap=1)
    broken = msgspec.structs.replace(answered(5, 1, 1), error="connection lost")
    silent = RequestRecord(sent=6, ended=7, status=200)
    found, plain = summarize([run([*whole, broken, silent])], NONE), summarize([run(whole)], NONE)
    assert found.errors == {"connection lost": 1, "an answer without a token": 1}
    assert (found.requests, found.answered) == (6, 4)
    assert found.output_tokens_per_second == plain.output_tokens_per_second and found.first_token == plain.first_token


# --- what is counted


def test_times() -> None:
    found = summarize([run([answered(0, 2, 1), answered(10, 4, 3)])], NONE)
    assert found.first_token and found.between_tokens and found.end_to_end
    assert (found.first_token.p50, found.first_token.largest) == (3, 4)
    assert (found.between_tokens.p50, found.between_tokens.mean, found.between_tokens.largest) == (2, 2, 3)
    assert (found.end_to_end.p50, found.end_to_end.largest) == (9, 13)


def test_the_servers_count_is_what_counts() -> None:
    """Two events bring eight tokens; the mean time between tokens follows."""
    record = RequestRecord(sent=0, ended=8, times=(1.0, 8.0), completion_tokens=8, prompt_tokens=9, cached_tokens=3)
    found = summarize([run([record])], Limits(between_tokens_seconds=1.0))
    assert found.output_tokens_per_second == pytest.approx(1.0) and found.tokens_per_event == 4
    assert (found.prompt_tokens, found.output_tokens, found.cached_tokens) == (9, 8, 3)
    assert record.mean_between_seconds == 1.0 and found.within_limits == 1.0


def test_answers_that_end_early_are_counted() -> None:
    assert summarize([run([answered(0, 1, 1, tokens=3), answered(4, 1, 1)])], NONE).short_answers == 1


# --- goodput


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        (Limits(first_token_seconds=2.0), [True, True, False]),
        (Limits(first_token_seconds=1.9), [True, False, False]),
        (Limits(between_tokens_seconds=1.0), [True, False, True]),
        (Limits(first_token_seconds=2.0, between_tokens_seconds=1.0), [True, False, False]),
        (Limits(), [True, True, True]),
    ],
)
def test_limits(limits: Limits, kept: list[bool]) -> None:
    records = [answered(0, 1, 1), answered(10, 2, 2), answered(20, 3, 1)]
    assert [limits.keeps(record) for record in records] == kept and not limits.keeps(failed(0))


def test_goodput() -> None:
    """Every other turn is slow: turns of 4 and of 14 seconds; failed requests are not within the limits."""
    records, now = [], 0.0
    for turn in range(9):
        records.append(answered(now, 1 + 10 * (turn % 2), 1))
        now = records[-1].ended
    found = summarize([run([*records, failed(now)])], Limits(first_token_seconds=2.0))
    assert found.within_limits == pytest.approx(5 / 10)
    assert found.window_seconds == now - 4 and found.goodput_per_second == pytest.approx(4 / (now - 4))
    assert summarize([run(records)], NONE).goodput_per_second is None


# --- rounds, and what does not matter


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0.01, 5), st.floats(0.01, 2), st.integers(2, 9)), min_size=1, max_size=20),
    st.floats(-1000, 1000),
    st.randoms(),
)
def test_neither_the_clocks_start_nor_the_order_matters(
    given_: list[tuple[float, float, float, int]], shift: float, chance: object
) -> None:
    records = [answered(*one) for one in given_]
    later = [answered(sent + shift, *rest) for sent, *rest in given_]
    chance.shuffle(later)  # type: ignore[attr-defined]
    limits = Limits(first_token_seconds=2.5)
    one, other = summarize([run(records)], limits), summarize([run(later)], limits)
    assert other.first_token and one.first_token and math.isclose(one.first_token.p90, other.first_token.p90, abs_tol=1e-6)
    assert math.isclose(one.whole_tokens_per_second, other.whole_tokens_per_second, rel_tol=1e-6)
    assert (one.answered, one.errors) == (other.answered, other.errors)
    assert 0 <= (one.goodput_per_second or 0) <= one.requests_per_second + 1e-9


def test_rounds_are_pooled() -> None:
    """Rounds of 30 s at 0.4 tokens/s and of 12 s at 1: their tokens over their seconds."""
    slow, quick = run(loop(1, 5, 7, 1), cpu=1.0), run(loop(1, 5, 1, 1), cpu=1.0)
    quick = msgspec.structs.replace(quick, steps=EngineSteps(steps=2, output_tokens=8))
    found = summarize([slow, quick], NONE)
    assert found.rounds_tokens_per_second == pytest.approx((0.4, 1.0)) and found.window_seconds == 42
    assert found.output_tokens_per_second == pytest.approx((12 + 12) / 42)
    assert found.requests == 10 and found.client_cpu_seconds_per_token == pytest.approx(2 / 40)
    assert found.client_cpu_share == pytest.approx(2 / 70)
    assert found.steps is None, "not all rounds have them"
    both = summarize([quick, quick], NONE).steps
    assert both is not None and both.steps == 4 and both.output_tokens_per_step == 4
