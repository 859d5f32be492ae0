"""Dispatch of many rows in plain torch: the items of the reference, whatever the rows chose."""

# ruff: noqa: E402 (the folder of cuda_references is put on the path first)

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

CUDA_TESTS = str(Path(__file__).parent)
if CUDA_TESTS not in sys.path:
    sys.path.insert(0, CUDA_TESTS)

from cuda_references import route_reference

from windlass.runtime.kernels.cuda import route

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(("rows", "num_shared"), [(1, 0), (5, 1), (200, 1), (64, 0)])
def test_dispatch_makes_the_items_of_the_reference(rows: int, num_shared: int) -> None:
    ids, weights = route_reference(torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows)), None, 4)
    made = route.dispatch(ids, weights, 16, num_shared, item_rows=32)
    expected = route.items_reference(ids, 16, num_shared, item_rows=32)
    assert made.num_items.item() == len(expected) <= made.item_expert.shape[0]
    for number, (expert, members, places) in enumerate(expected):
        assert made.item_expert[number].item() == expert
        assert [r for r in made.item_rows[number].tolist() if r >= 0] == members
        assert [p for p in made.item_places[number].tolist() if p >= 0] == places


def test_weights_sum_to_the_scale_() -> None:
    logits = torch.zeros(1, 8)
    logits[0, 5] = 1.0
    ids, weights = route_reference(logits, torch.zeros(8), 2, routed_scale=2.5)
    assert ids[0, 0].item() == 5
    assert weights.sum().item() == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("count", "item_rows", "each"),
    [
        (0, 80, 1),
        (1, 80, 16),
        (64, 80, 64),
        (80, 80, 80),
        (81, 80, 48),
        (128, 80, 64),
        (129, 80, 80),
        (161, 80, 64),
        (9, 8, 8),
        (300, 64, 64),
    ],
)
def test_an_experts_rows_are_shared_out_evenly(count: int, item_rows: int, each: int) -> None:
    assert route.rows_of_each(count, item_rows) == each


@given(count=st.integers(1, 5000), item_rows=st.sampled_from([8, 16, 32, 48, 64, 80, 128, 160]))
def test_no_more_items_than_full_ones_would_be(count: int, item_rows: int) -> None:
    each = route.rows_of_each(count, item_rows)
    assert each <= item_rows and -(-count // each) == -(-count // item_rows)
