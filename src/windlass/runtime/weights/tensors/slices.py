"""Rectangular slices of stored tensors: intersection, difference, union. Used to work out what a rank still needs. Pure.

A tensor is treated as rows of equal width (core.ports.TensorStore), a vector as rows of one element. Knows neither ranks nor files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from windlass.core.model import Frozen
from windlass.core.place import Interval


class Slice(Frozen, array_like=True):
    name: str
    """Name of the stored tensor."""
    rows: Interval
    columns: Interval = (0, 1)
    """Elements of each row."""

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def num_columns(self) -> int:
        return self.columns[1] - self.columns[0]

    @property
    def is_empty(self) -> bool:
        return self.num_rows <= 0 or self.num_columns <= 0


def overlap(one: Slice, other: Slice) -> Slice | None:
    """Intersection of two slices of the same tensor."""
    rows = max(one.rows[0], other.rows[0]), min(one.rows[1], other.rows[1])
    columns = max(one.columns[0], other.columns[0]), min(one.columns[1], other.columns[1])
    found = Slice(name=one.name, rows=rows, columns=columns)
    return None if found.is_empty else found


def without(wanted: Slice, held: Slice) -> list[Slice]:
    """Difference of two rectangles: at most four rectangles."""
    common = overlap(wanted, held)
    if common is None:
        return [wanted]
    (top, bottom), (left, right) = common.rows, common.columns
    parts = (
        ((wanted.rows[0], top), wanted.columns),
        ((bottom, wanted.rows[1]), wanted.columns),
        (common.rows, (wanted.columns[0], left)),
        (common.rows, (right, wanted.columns[1])),
    )
    made = (Slice(name=wanted.name, rows=rows, columns=columns) for rows, columns in parts)
    return [part for part in made if not part.is_empty]


def by_name(slices: Iterable[Slice]) -> dict[str, list[Slice]]:
    found: dict[str, list[Slice]] = {}
    for one in slices:
        found.setdefault(one.name, []).append(one)
    return found


def subtract(wanted: Iterable[Slice], held: Iterable[Slice]) -> list[Slice]:
    """`wanted` minus `held`, in the order of `wanted`."""
    had = by_name(held)
    return [left for one in wanted for left in _left_of(one, had.get(one.name, ()))]


def _left_of(wanted: Slice, held: Iterable[Slice]) -> list[Slice]:
    left = [wanted]
    for one in held:
        left = [part for before in left for part in without(before, one)]
        if not left:
            break
    return left


def disjoint(slices: Iterable[Slice]) -> list[Slice]:
    """The same elements without overlaps; adjacent slices are merged."""
    found: dict[str, list[Slice]] = {}
    for one in slices:
        if not one.is_empty:
            so_far = found.setdefault(one.name, [])
            if so_far and _follows(so_far[-1], one) and len(so_far) == 1:
                so_far[-1] = _joined(so_far[-1], one)  # fast path for stacked experts, of which there may be hundreds
            else:
                so_far += _left_of(one, so_far)
    return [one for parts in found.values() for one in _merged(parts)]


def _follows(one: Slice, other: Slice) -> bool:
    return one.columns == other.columns and one.rows[1] == other.rows[0]


def _joined(one: Slice, other: Slice) -> Slice:
    return Slice(name=one.name, rows=(one.rows[0], other.rows[1]), columns=one.columns)


def _merged(parts: list[Slice]) -> Iterator[Slice]:
    """Merges slices with the same columns and consecutive rows."""
    last: Slice | None = None
    for one in sorted(parts, key=lambda part: (part.columns, part.rows)):
        if last is not None and _follows(last, one):
            last = _joined(last, one)
            continue
        if last is not None:
            yield last
        last = one
    if last is not None:
        yield last
