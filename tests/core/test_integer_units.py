"""How integer products are cut into units: a table of real shapes, and what must hold of all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core import integer_units

pytestmark = pytest.mark.pure
PROCESSORS = 132


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "expected"),
    [  # Llama-3.1-70B
        (16, 8192, 28672, (16, 4)),
        (32, 8192, 28672, (32, 4)),
        (40, 8192, 28672, (48, 4)),
        (64, 8192, 28672, (64, 4)),
        (64, 8192, 8192, (64, 4)),
        (2048, 8192, 8192, (128, 1)),
    ],
)
def test_units_of_known_shapes(rows: int, outputs: int, inputs: int, expected: tuple[int, int]) -> None:
    """Rows of x, slices of the inputs."""
    way = integer_units.cut(rows, outputs // 16, inputs // 128, PROCESSORS)
    assert (way.rows, way.slices) == expected


@given(st.integers(9, 4096), st.integers(1, 4096), st.integers(1, 256))
def test_slices_divide_the_inputs_and_each_has_a_thread_block(rows: int, tiles: int, blocks: int) -> None:
    way = integer_units.cut(rows, tiles, blocks, PROCESSORS)
    units = -(-tiles // way.shape.tiles) * -(-rows // way.rows)
    assert blocks % way.slices == 0 and (way.slices == 1 or units * way.slices <= PROCESSORS)
    assert any(way[:2] == kind[:2] for kind in integer_units.UNIT_KINDS)


@pytest.mark.parametrize(("mean", "expected"), [(6.1, 16), (8, 16), (10, 32), (20, 32), (32, 48), (64, 80)])
def test_items_hold_most_experts_rows(mean: float, expected: int) -> None:
    assert integer_units.item_rows(mean) == expected
