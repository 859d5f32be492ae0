"""What makes a step bad, and how a run is asked to stop."""

from __future__ import annotations

import math
import os
import random
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.tasks.train.loop.guard import Diverged, LossGuard, StoppedBeforeStart, StopRequest

pytestmark = pytest.mark.pure


def fed(losses: list[float], **settings: float) -> LossGuard:
    guard = LossGuard(**settings)  # type: ignore[arg-type]
    for loss in losses:
        assert guard.judge(loss, 1.0) is None, loss
    return guard


def falling(steps: int, noise: float = 0.05, seed: int = 0) -> list[float]:
    """As losses fall: quickly, then slowly, with noise."""
    chance = random.Random(seed)
    return [2.0 + 8.0 * math.exp(-step / 50) + chance.gauss(0, noise) for step in range(steps)]


# --- spikes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_a_usual_run_has_no_spike(seed: int) -> None:
    fed(falling(400, seed=seed))


@pytest.mark.parametrize(("loss", "bad"), [(2.15, False), (2.2, False), (3.5, True), (10.0, True)])
def test_a_spike_is_seen(loss: float, bad: bool) -> None:
    guard = fed(falling(300))
    assert (guard.judge(loss, 1.0) is not None) is bad


def test_a_spike_says_how_far_it_lies_off() -> None:
    why = fed(falling(300)).judge(10.0, 1.0)
    assert why is not None and why.startswith("the loss spiked to 10, ") and "deviations above the median 2." in why


def test_a_spike_does_not_move_the_measure() -> None:
    guard = fed(falling(300))
    for _ in range(50):
        assert guard.judge(10.0, 1.0) is not None


@pytest.mark.parametrize(("loss", "norm", "why"), [
    (math.nan, 1.0, "the loss is nan"), (math.inf, 1.0, "the loss is inf"), (2.0, math.nan, "the gradient norm is nan"),
])  # fmt: skip
def test_what_is_no_number_is_bad_from_the_first_step(loss: float, norm: float, why: str) -> None:
    assert LossGuard().judge(loss, norm) == why


def test_the_first_steps_are_not_judged() -> None:
    guard = LossGuard(least_steps=16)
    assert all(guard.judge(loss) is None for loss in (1.0, 50.0, 2.0))


def test_equal_losses_do_not_make_the_next_a_spike() -> None:
    guard = fed([2.0] * 64)
    assert guard.judge(2.02) is None
    assert guard.judge(3.0) is not None


def test_no_threshold_lets_spikes_pass() -> None:
    assert fed(falling(300), threshold=0.0).judge(1000.0) is None


@given(st.lists(st.floats(0.1, 20.0), min_size=16, max_size=64), st.floats(0.1, 20.0), st.floats(0.1, 10.0), st.floats(-5.0, 5.0))
def test_the_score_knows_no_scale(losses: list[float], loss: float, scale: float, shift: float) -> None:
    """Scaled losses are as far off as before; a score falls with nothing but the loss."""
    plain, scaled = LossGuard(threshold=0.0), LossGuard(threshold=0.0)
    for value in losses:
        plain.judge(value)
        scaled.judge(value * scale)
    assert scaled.score(loss * scale) == pytest.approx(plain.score(loss), rel=1e-6, abs=1e-9)
    assert plain.score(loss) <= plain.score(loss + abs(shift))


# --- rolling back -----------------------------------------------------------------------------------------------------


def test_rolling_back_for_ever_is_given_up() -> None:
    guard = LossGuard(max_rollbacks=2)
    guard.record_rollback("the loss is nan")
    guard.record_rollback("the loss is nan")
    with pytest.raises(Diverged, match="training diverged: the loss is nan, and 2 consecutive rollbacks did not help") as caught:
        guard.record_rollback("the loss is nan")
    assert caught.value.exit_code == 4


def test_rollbacks_far_apart_are_counted_anew() -> None:
    guard = LossGuard(window=8, least_steps=4, max_rollbacks=1)
    for _ in range(5):
        guard.record_rollback("a spike")
        for _ in range(8):
            guard.judge(2.0)


def test_steps_that_come_again_show_no_recovery() -> None:
    """Behind a checkpoint far back a whole window of good steps comes again before the one that breaks."""
    guard = LossGuard(window=8, least_steps=4, max_rollbacks=2)
    with pytest.raises(Diverged):
        for _ in range(3):
            for _ in range(20):
                guard.judge(2.0)
            guard.record_rollback("the loss is nan")
            guard.expect_replay(20)


# --- stopping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT])
def test_a_signal_asks(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.reason is None
        os.kill(os.getpid(), number)
        assert stop.reason == number.name
    assert signal.getsignal(number) is before


def test_the_second_interrupt_does_not_wait() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.reason == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_hangup_that_is_ignored_stays_so() -> None:
    """As under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.reason is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_signal_before_there_is_anything_to_save() -> None:
    with StopRequest(ends_at_once=True) as stop:
        with pytest.raises(StoppedBeforeStart) as caught:
            os.kill(os.getpid(), signal.SIGTERM)
        assert caught.value.reason == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        stop.begin()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.reason == "SIGINT"
