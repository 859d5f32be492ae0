"""The cache of experts: slots are never shared, what is asked for is there, and the policy keeps what it should."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.runtime.offload.experts.cache import ExpertCache
from windlass.runtime.offload.experts.pieces import groups, next_piece

pytestmark = pytest.mark.pure


def ask(cache: ExpertCache, layer: int, *experts: int) -> tuple[list[int], list[bool]]:
    found = cache.fetch(layer, np.array(experts, dtype=np.int64))
    return found.slots.tolist(), found.missing.tolist()


def test_what_was_fetched_is_found() -> None:
    cache = ExpertCache(num_layers=2, num_experts=8, num_slots=4)
    slots, missing = ask(cache, 0, 1, 5)
    assert missing == [True, True] and len(set(slots)) == 2
    again, missing = ask(cache, 0, 5)
    assert missing == [False] and again == [slots[1]]
    _, missing = ask(cache, 1, 5)
    assert missing == [True], "the same number in another layer is another expert"
    assert (cache.counts.hits, cache.counts.misses) == (1, 3)


def test_recency_evicts_the_oldest() -> None:
    cache = ExpertCache(1, 8, 2, half_life=1e-3)
    for expert in (0, 1, 0):
        ask(cache, 0, expert)
        cache.fetch(0, np.array([], dtype=np.int64))
    steps(cache)
    ask(cache, 0, 2)
    assert ask(cache, 0, 0)[1] == [False] or ask(cache, 0, 1)[1] == [False]


def steps(cache: ExpertCache, count: int = 1) -> None:
    """Passes so many steps: a step begins when a layer comes again."""
    for _ in range(count):
        cache._step += 1


@pytest.mark.parametrize(("half_life", "kept"), [(1e-3, 1), (1e9, 0)])
def test_the_half_life_is_between_recency_and_frequency(half_life: float, kept: int) -> None:
    """Expert 0 was used often and long ago, expert 1 once and lately."""
    cache = ExpertCache(1, 8, 2, half_life=half_life)
    for _ in range(5):
        ask(cache, 0, 0)
        steps(cache)
    ask(cache, 0, 1)
    steps(cache)
    ask(cache, 0, 2)
    assert ask(cache, 0, kept)[1] == [False]


def test_a_slot_that_was_not_filled_is_forgotten() -> None:
    cache = ExpertCache(1, 8, 2)
    ask(cache, 0, 3)
    cache.forget(0, np.array([3], dtype=np.int64))
    assert ask(cache, 0, 3)[1] == [True]


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 2), st.sets(st.integers(0, 7), min_size=1)), max_size=60), st.data())
def test_slots_are_never_shared_and_hold_what_they_should(
    num_slots: int, asked: list[tuple[int, set[int]]], data: st.DataObject
) -> None:
    cache = ExpertCache(3, 8, num_slots, half_life=data.draw(st.sampled_from([1e-3, 4.0, 1e9])))
    holds: dict[int, tuple[int, int]] = {}
    for layer, wanted in asked:
        experts = sorted(wanted)[:num_slots]
        slots, missing = ask(cache, layer, *experts)
        assert len(set(slots)) == len(slots) and all(0 <= slot < num_slots for slot in slots)
        for expert, slot, is_missing in zip(experts, slots, missing, strict=True):
            assert is_missing == (holds.get(slot) != (layer, expert))
            holds[slot] = (layer, expert)


@given(st.integers(2, 6), st.lists(st.integers(0, 7), max_size=60))
def test_a_tiny_half_life_is_least_recently_used(num_slots: int, asked: list[int]) -> None:
    cache, model = ExpertCache(1, 8, num_slots, half_life=1e-3), OrderedDict[int, None]()
    for expert in asked:
        steps(cache)
        hit = expert in model
        assert ask(cache, 0, expert)[1] == [not hit]
        model[expert] = None
        model.move_to_end(expert)
        if len(model) > num_slots:
            model.popitem(last=False)


@given(st.lists(st.integers(0, 200), unique=True, max_size=40).map(sorted), st.integers(1, 50))
def test_groups_keep_the_order_and_fit(experts: list[int], num_slots: int) -> None:
    found = groups(experts, num_slots)
    assert [expert for group in found for expert in group] == experts
    assert all(0 < len(group) <= num_slots for group in found)
    assert len(found) <= 1 or num_slots == 1 or all(2 * len(group) <= num_slots for group in found), "two share the slots"


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 32), st.data())
def test_a_piece_ends_where_much_was_awaited(
    is_there: list[bool], expert_bytes: int, piece_bytes: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(is_there) - 1))
    stop = next_piece(start, is_there, expert_bytes, piece_bytes)
    assert stop > start, "something is computed"
    awaited = [index for index in range(start, stop) if not is_there[index]]
    assert (len(awaited) - 1) * expert_bytes < piece_bytes
    assert stop == len(is_there) or (not is_there[stop] and len(awaited) * expert_bytes >= piece_bytes)


def test_what_is_reserved_has_a_slot_and_counts_as_missing() -> None:
    cache = ExpertCache(num_layers=2, num_experts=8, num_slots=4)
    first, _ = ask(cache, 0, 1, 5)
    reserved = cache.reserve(1, np.array([2, 3], dtype=np.int64), np.array(first, dtype=np.int64))
    assert reserved.missing.tolist() == [True, True] and not set(reserved.slots.tolist()) & set(first)
    assert (cache.counts.hits, cache.counts.misses) == (0, 2), "nothing has asked for it yet"
    found = cache.fetch(1, np.array([3], dtype=np.int64), num_foreseen=1)
    assert found.slots.tolist() == [reserved.slots[1]] and not found.missing.any()
    assert (cache.counts.hits, cache.counts.misses, cache.counts.foreseen) == (0, 3, 1)
    ask(cache, 0, 6)
    assert ask(cache, 0, 1)[1] == [False] and ask(cache, 1, 3)[1] == [False], "what was reserved for nothing makes room first"
