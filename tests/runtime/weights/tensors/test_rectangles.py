"""The algebra of slices: what is wanted, less what is held, is exactly what is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.runtime.weights.tensors.slices import Slice, disjoint, overlap, subtract, without

pytestmark = pytest.mark.pure

SIZE = 12


@st.composite
def rectangles(draw: st.DrawFn) -> Slice:
    rows = sorted(draw(st.lists(st.integers(0, SIZE), min_size=2, max_size=2, unique=True)))
    columns = sorted(draw(st.lists(st.integers(0, SIZE), min_size=2, max_size=2, unique=True)))
    return Slice(name=draw(st.sampled_from("ab")), rows=(rows[0], rows[1]), columns=(columns[0], columns[1]))


def elements(slices: list[Slice]) -> list[tuple[str, int, int]]:
    return [(one.name, row, column) for one in slices for row in range(*one.rows) for column in range(*one.columns)]


@given(st.lists(rectangles(), max_size=6), st.lists(rectangles(), max_size=6))
def test_subtract(wanted: list[Slice], held: list[Slice]) -> None:
    left = subtract(disjoint(wanted), held)
    assert set(elements(left)) == set(elements(wanted)) - set(elements(held))
    assert len(elements(left)) == len(set(elements(left))), "nothing twice"


@given(st.lists(rectangles(), max_size=8))
def test_disjoint(slices: list[Slice]) -> None:
    made = disjoint(slices)
    assert set(elements(made)) == set(elements(slices))
    assert len(elements(made)) == len(set(elements(made)))


@given(rectangles(), rectangles())
def test_overlap(one: Slice, other: Slice) -> None:
    found = overlap(one, Slice(name=one.name, rows=other.rows, columns=other.columns))
    common = {at[1:] for at in elements([one])} & {at[1:] for at in elements([other])}
    assert {at[1:] for at in elements([found] if found else [])} == common


def test_a_hole_leaves_four() -> None:
    whole, hole = Slice(name="a", rows=(0, 9), columns=(0, 9)), Slice(name="a", rows=(3, 6), columns=(3, 6))
    assert without(whole, hole) == [
        Slice(name="a", rows=(0, 3), columns=(0, 9)),
        Slice(name="a", rows=(6, 9), columns=(0, 9)),
        Slice(name="a", rows=(3, 6), columns=(0, 3)),
        Slice(name="a", rows=(3, 6), columns=(6, 9)),
    ]


def test_neighbours_become_one() -> None:
    rows = [Slice(name="a", rows=(at, at + 1), columns=(0, 4)) for at in range(300)]
    assert disjoint(rows) == [Slice(name="a", rows=(0, 300), columns=(0, 4))]
    assert disjoint(rows[::-1]) == [Slice(name="a", rows=(0, 300), columns=(0, 4))]
