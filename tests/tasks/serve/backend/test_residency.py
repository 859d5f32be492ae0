"""Which models stay in memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.tasks.serve.backend.residency import LoadedModel, MemoryRoom, fits, idle_for, may_end, to_unload, turn_seconds

pytestmark = pytest.mark.pure


def model(name: str, num_bytes: int = 10, in_use: int = 0, last_used: float = 0.0, turn_ends: float = 0.0) -> LoadedModel:
    return LoadedModel(name=name, num_bytes=num_bytes, in_use=in_use, last_used=last_used, turn_ends=turn_ends)


@pytest.mark.parametrize(
    ("loaded", "num_bytes", "room", "gone"),
    [
        ([], 100, MemoryRoom(max_bytes=10), ()),  # alone it may be tried
        ([model("a")], 10, MemoryRoom(), ()),
        ([model("a")], 10, MemoryRoom(max_models=1), ("a",)),
        ([model("a"), model("b", last_used=1)], 10, MemoryRoom(max_models=2), ("a",)),
        ([model("a", in_use=1), model("b", last_used=9)], 10, MemoryRoom(max_models=2), ("b",)),  # idle ones first
        ([model("a"), model("b", last_used=1)], 15, MemoryRoom(max_bytes=30), ("a",)),
        ([model("a"), model("b", last_used=1)], 25, MemoryRoom(max_bytes=30), ("a", "b")),
        ([model("a", 20), model("b", 5, last_used=1)], 10, MemoryRoom(max_bytes=40), ()),
    ],
)
def test_what_makes_room(loaded: list[LoadedModel], num_bytes: int, room: MemoryRoom, gone: tuple[str, ...]) -> None:
    assert to_unload(loaded, num_bytes, room) == gone


models = st.lists(
    st.builds(model, st.sampled_from("abcdef"), st.integers(1, 50), st.integers(0, 2), st.floats(0, 9)),
    unique_by=lambda one: one.name,
)


@given(models, st.integers(1, 60), st.builds(MemoryRoom, max_models=st.integers(1, 4), max_bytes=st.integers(1, 120)))
def test_afterwards_it_fits_and_none_was_unloaded_in_vain(loaded: list[LoadedModel], num_bytes: int, room: MemoryRoom) -> None:
    gone = to_unload(loaded, num_bytes, room)
    assert fits([one for one in loaded if one.name not in gone], num_bytes, room)
    if gone:
        assert not fits([one for one in loaded if one.name not in gone[:-1]], num_bytes, room)


def test_a_busy_model_keeps_its_turn() -> None:
    assert may_end(model("a", turn_ends=10), now=5)
    assert not may_end(model("a", in_use=1, turn_ends=10), now=5)
    assert may_end(model("a", in_use=1, turn_ends=10), now=10)
    assert turn_seconds(0.1) == 2.0 and turn_seconds(10.0) == 40.0


def test_idle() -> None:
    assert not idle_for(model("a", last_used=1), 100, None)
    assert idle_for(model("a", last_used=1), 100, 50)
    assert not idle_for(model("a", in_use=1, last_used=1), 100, 50)
