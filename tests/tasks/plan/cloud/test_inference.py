"""Offers: only those that run it, cheapest first, with dates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from windlass.core.hardware.parse import parse_hardware
from windlass.core.plan import CloudOffer
from windlass.model.families import rules
from windlass.model.families.registry import find, spec_of
from windlass.tasks.plan.cloud.inference import cloud_offers
from windlass.tasks.plan.inference.search.request import PlanRequest

pytestmark = pytest.mark.pure


@pytest.fixture(scope="module")
def question() -> PlanRequest:
    known = find("INTELLECT-3")
    assert known is not None
    spec = spec_of(known)
    return PlanRequest(spec=spec, rules=rules(spec), hardware=parse_hardware("1xH200"), context_tokens=8192)


@pytest.fixture(scope="module")
def fresh(question: PlanRequest) -> tuple[CloudOffer, ...]:
    return cloud_offers(question)


def test_offers_are_sorted_dated_and_large_enough(fresh: tuple[CloudOffer, ...]) -> None:
    found = fresh
    assert found
    assert [one.usd_per_hour for one in found] == sorted(one.usd_per_hour for one in found)
    for one in found:
        assert len(one.priced_at) == 10 and one.decode_tokens_per_second > 0
        assert not one.stale and one.verified
        assert one.num_devices * parse_hardware(one.device).devices[0].memory_bytes > 57 * 10**9
        assert one.download_hours == pytest.approx(213.7 / 0.5 / 3600, rel=0.01)


def test_cost_goal_sorts_by_price_of_a_token(question: PlanRequest) -> None:
    found = cloud_offers(replace(question, goal="cost"))
    prices = [one.usd_per_million_output_tokens for one in found]
    assert prices == sorted(prices)
    assert found[0].usd_per_million_output_tokens == pytest.approx(
        found[0].usd_per_hour / 3600 / found[0].decode_tokens_per_second * 1e6, rel=0.5
    )


def test_stale_offers_only_when_asked(question: PlanRequest, fresh: tuple[CloudOffer, ...]) -> None:
    every = cloud_offers(question, all_offers=True)
    assert len(every) > len(fresh)
    assert any(one.stale for one in every)


def test_break_even_is_card_price_over_rent(fresh: tuple[CloudOffer, ...]) -> None:
    one = next(one for one in fresh if one.break_even_hours and one.device == "H200" and one.num_devices == 1)
    from windlass.tasks.plan.cost.prices import purchase_price

    card = purchase_price("H200")
    assert card is not None and one.break_even_hours == pytest.approx(card.usd / one.usd_per_hour, rel=1e-3)
