"""How integer products are cut into units: a table of real shapes, and what must hold of all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core import integer_units

pytestmark = pytest.mark.pure
PROCESSORS = 132


@pytest.mark.parametrize(
    ("rows", "expected"), [(9, 16), (16, 16), (32, 32), (40, 48), (64, 64), (70, 80), (128, 128), (2048, 128)]
)
def test_rows_of_units(rows: int, expected: int) -> None:
    """Of Llama-3.1-70B's matrices."""
    for outputs, inputs in ((57344, 8192), (8192, 28672), (8192, 8192), (10240, 8192)):
        assert integer_units.cut(rows, outputs // 16, inputs // 128, PROCESSORS).rows == expected


@given(st.integers(9, 4096), st.integers(1, 4096), st.integers(1, 256))
def test_no_way_is_faster(rows: int, tiles: int, blocks: int) -> None:
    way = integer_units.cut(rows, tiles, blocks, PROCESSORS)
    assert any(way[:2] == kind[:2] for kind in integer_units.UNIT_KINDS)
    for kind in integer_units.UNIT_KINDS:
        units = -(-tiles // kind.shape.tiles) * -(-rows // kind.rows)
        assert way.seconds <= units * blocks / PROCESSORS * kind.seconds + integer_units.HAND_ON_SECONDS


@pytest.mark.parametrize(("mean", "expected"), [(6.1, 16), (8, 16), (10, 32), (20, 32), (32, 48), (64, 80)])
def test_items_hold_most_experts_rows(mean: float, expected: int) -> None:
    assert integer_units.item_rows(mean) == expected
