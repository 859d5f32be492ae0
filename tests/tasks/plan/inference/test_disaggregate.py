"""Prompts and decoding on machines of their own: units for a rate, the KV cache's way over the network, and what is refused."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.hardware.parse import parse_hardware
from windlass.core.plan import DisaggregatedPlan
from windlass.errors import BadInput, Impossible
from windlass.open.resolve import describe_model
from windlass.tasks.plan.inference.disaggregate import PrefillUnit, disaggregate
from windlass.tasks.plan.inference.search.request import LoadRequest, PlanRequest

pytestmark = pytest.mark.pure

DECODE, PREFILL = "2x(4xH100-80GB)@400Gb", "2x(2xH100-80GB)@400Gb"


def planned(
    rate: float = 4.0,
    *,
    first: float = 2.0,
    between: float = 0.06,
    prefill_on: str = PREFILL,
    engine: str = "vllm",
    cached: float = 0.0,
) -> DisaggregatedPlan:
    found = describe_model("Llama-3.3-70B-Instruct")
    request = PlanRequest(
        spec=found.spec, rules=found.rules, hardware=parse_hardware(DECODE), context_tokens=8192, engine=engine, quant="fp8",
        prompt_tokens=4096, new_tokens=512, cached_prefix=cached, load=LoadRequest(rate, first, between),
    )  # fmt: skip
    return disaggregate(request, parse_hardware(prefill_on))


def test_a_higher_rate_needs_more_units_of_both_kinds() -> None:
    few, many = planned(4), planned(40)
    assert few.within and many.within
    assert many.prefill.units > few.prefill.units >= 1 and many.decode.units >= few.decode.units >= 1
    for found in (few, many):
        for pool in (found.prefill, found.decode):
            assert (pool.units - 1) * pool.most_requests_per_second < found.requests_per_second * 1.001
            assert pool.units * pool.most_requests_per_second >= found.requests_per_second * 0.999
        assert found.time_to_first_token_seconds <= 2.0 and found.time_per_token_seconds <= 0.06


def test_the_cache_goes_over_the_network() -> None:
    fast, slow = planned(), planned(prefill_on=PREFILL.replace("400Gb", "10Gb"))
    # 80 layers, 8 KV heads of 128, keys and values in bf16
    assert fast.kv_bytes == 4096 * 80 * 2 * 8 * 128 * 2
    assert slow.transfer_seconds == pytest.approx(slow.kv_bytes / slow.link_bytes_per_second, rel=1e-3)
    assert slow.transfer_seconds > 10 * fast.transfer_seconds
    assert slow.time_to_first_token_seconds > fast.time_to_first_token_seconds


def test_a_cached_prefix_saves_prefill_but_not_the_transfer() -> None:
    whole, half = planned(40), planned(40, cached=0.5)
    assert half.prefill.units < whole.prefill.units
    assert half.kv_bytes == whole.kv_bytes


def test_limits_that_nothing_keeps() -> None:
    found = planned(first=0.001)
    assert not found.within and found.prefill.units == 0


@pytest.mark.parametrize(("change", "error"), [({"engine": "llama.cpp"}, BadInput), ({"prefill_on": "1xRTX-4090"}, Impossible)])
def test_what_cannot_be(change: dict[str, str], error: type[Exception]) -> None:
    with pytest.raises(error):
        planned(**change)  # pyright: ignore[reportArgumentType]


def test_it_needs_a_load() -> None:
    found = describe_model("Llama-3.3-70B-Instruct")
    request = PlanRequest(spec=found.spec, rules=found.rules, hardware=parse_hardware(DECODE), context_tokens=8192)
    with pytest.raises(BadInput, match="--rate"):
        disaggregate(request, parse_hardware(PREFILL))


@given(st.floats(0.001, 10), st.floats(1, 3), st.floats(0.0, 100))
def test_the_highest_rate_keeps_the_limit_and_no_higher_one_does(seconds: float, alone: float, limit: float) -> None:
    unit = PrefillUnit(seconds, seconds * alone)
    most = unit.most_within(limit)
    assert 0 <= most <= 1 / seconds
    if most:
        assert unit.first_seconds + unit.wait(most * 0.999) <= limit * 1.001
    higher = most * 1.01 + 1e-6 / seconds
    assert unit.first_seconds + unit.wait(higher) > limit * 0.99 or most > 0.989 / seconds
    assert unit.wait(1.001 / seconds) == inf
