"""Limits of keys, with a clock of our own."""

from __future__ import annotations

import pytest

from windlass.tasks.serve.api_key import ApiKey
from windlass.tasks.serve.backend.quotas import Quotas

pytestmark = pytest.mark.pure


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def quotas(**limits: int) -> tuple[Quotas, Clock]:
    clock = Clock()
    return Quotas([ApiKey(name="a", key="alpha", **limits), ApiKey(name="b", key="beta")], clock), clock


def test_requests_refill() -> None:
    found, clock = quotas(requests_per_minute=2)
    assert [found.take(1) for _ in range(2)] == [None, None]
    exceeded = found.take(1)
    assert exceeded is not None and (exceeded.limit, exceeded.retry_seconds) == ("requests_per_minute", 30)
    assert found.take(2) is None and found.take(0) is None, "others have no limit"
    clock.now += 29
    assert found.take(1) is not None
    clock.now += 1
    assert found.take(1) is None


def test_tokens_are_a_debt() -> None:
    found, clock = quotas(tokens_per_minute=60)
    assert found.take(1) is None
    found.charge(1, 120)
    exceeded = found.take(1)
    assert exceeded is not None and exceeded.retry_seconds == 61
    clock.now += 61
    assert found.take(1) is None


def test_the_longest_wait_is_named() -> None:
    found, _ = quotas(tokens_per_minute=60, tokens_per_day=100)
    found.take(1)
    found.charge(1, 100)
    exceeded = found.take(1)
    assert exceeded is not None and exceeded.limit == "tokens_per_day"


def test_tokens_that_may_be_used_are_held_while_a_request_runs() -> None:
    """Requests at once cannot exceed a limit together: the second one waits for what the first may still use."""
    found, _ = quotas(tokens_per_minute=100)
    assert found.take(1) is None
    with found.holding(1, 100):
        assert found.take(1) is not None
        found.charge(1, 30)
    assert found.take(1) is None, "what was not used is given back"
    with found.holding(1, 69):
        assert found.take(1) is None
        with found.holding(1, 1):
            assert found.take(1) is not None
