"""The intervals of predictions: what their file holds is what the residuals give, and rows of sources that had no part in them lie inside."""

from __future__ import annotations

import importlib.util
import sys
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.pure

_module = importlib.util.spec_from_file_location("spread", Path(__file__).parents[4] / "bench" / "plan" / "spread.py")
assert _module is not None and _module.loader is not None
bench = importlib.util.module_from_spec(_module)
sys.modules["spread"] = bench
_module.loader.exec_module(bench)


@pytest.fixture(scope="module")
def found() -> list[Any]:
    return bench.residuals()


def test_the_file_is_what_the_residuals_give(found: list[Any]) -> None:
    assert bench.TARGET.read_text(encoding="utf-8") == bench.entries(found), "run python bench/plan/spread.py --write"


def test_rows_of_a_source_lie_inside_the_interval_of_the_others(found: list[Any]) -> None:
    kinds = {kind: these for kind, these in bench.by_kind(found).items() if len(these) >= bench.FEW}
    assert len(kinds) >= 8
    assert {kind: share for kind, these in kinds.items() if not 0.75 <= (share := bench.held_by_others(these)) <= 0.9} == {}


@given(st.lists(st.floats(-1, 1), min_size=9, max_size=60))
def test_eight_of_ten_lie_inside_their_own_half_width(distances: list[float]) -> None:
    half = bench.half_width(distances)
    assert sum(abs(one) <= half for one in distances) >= 0.8 * len(distances)


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=3))
def test_few_rows_give_a_wider_interval_than_the_furthest_of_them(distances: list[float]) -> None:
    assert bench.half_width(distances) > max(distances)


def test_others_engines_have_no_interval_narrower_than_machines_differ() -> None:
    row = bench.Residual("decode one", "somebody", log(1.01))
    assert exp(bench.width("decode one", [row] * 20)) >= 1.15 - 1e-3
