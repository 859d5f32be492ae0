"""The memory of intermediate results: given out once at a time, given back with the last tensor that sees it."""

from __future__ import annotations

import gc
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from windlass.runtime.kernels.program.arena import ALIGNMENT, CHUNK_BYTES, Arena

pytestmark = pytest.mark.cpu


def span(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def test_tensors_have_the_shape_and_type_that_was_asked_for() -> None:
    arena = Arena()
    for dtype in (torch.float32, torch.int32, torch.bfloat16, torch.int64):
        made = arena.empty((3, 5, 7), dtype)
        assert made.shape == (3, 5, 7) and made.dtype == dtype and made.is_contiguous()
        assert made.data_ptr() % ALIGNMENT == 0
        assert arena.owns(made) and arena.owns(made[1:, 2])
    assert arena.empty((0, 4), torch.float32).shape == (0, 4)
    assert not arena.owns(torch.zeros(3))


def test_memory_is_used_again_once_nobody_sees_it() -> None:
    arena = Arena()
    first = arena.empty((1000,), torch.float32)
    where, part = first.data_ptr(), first[10:20]
    del first
    second = arena.empty((1000,), torch.float32)
    assert second.data_ptr() != where, "a view still sees the first"
    del part
    third = arena.empty((1000,), torch.float32)
    assert third.data_ptr() == where


def test_many_short_lives_need_the_memory_of_one() -> None:
    arena = Arena()
    for _ in range(100):
        arena.empty((CHUNK_BYTES // 8,), torch.float32)
    assert arena.num_bytes == CHUNK_BYTES


def test_neighbours_that_are_free_become_one() -> None:
    arena = Arena()
    thirds = [arena.empty((CHUNK_BYTES // 3 // ALIGNMENT * ALIGNMENT,), torch.uint8) for _ in range(3)]
    while thirds:
        thirds.pop(len(thirds) // 2)
    arena.empty((CHUNK_BYTES,), torch.uint8)
    assert arena.num_bytes == CHUNK_BYTES


def test_what_is_larger_than_a_chunk_gets_one_of_its_own() -> None:
    arena = Arena()
    small, large = arena.empty((10,), torch.uint8), arena.empty((CHUNK_BYTES + 1,), torch.uint8)
    assert arena.owns(small) and arena.owns(large)
    assert CHUNK_BYTES * 2 < arena.num_bytes <= CHUNK_BYTES * 2 + ALIGNMENT


def test_it_goes_when_all_is_gone() -> None:
    arena = Arena()
    made = arena.empty((10,), torch.float32)
    del arena
    gc.collect()
    made.fill_(1.0)
    assert made.sum() == 10


@given(st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 6)), max_size=60))
def test_no_two_living_tensors_overlap(wishes: list[tuple[int, int]]) -> None:
    """Whatever lives, dies and is asked for: what one writes, another never sees."""
    arena, alive = Arena(), []
    for number, (size, victim) in enumerate(wishes):
        made = arena.empty((size,), torch.int32)
        made.fill_(number)
        alive.append((made, number))
        if victim < len(alive):
            del alive[victim]
        assert all((tensor == value).all() for tensor, value in alive)
        spans = sorted(span(tensor) for tensor, _ in alive if tensor.nbytes)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
