"""Rows, shapes and names of stored tensors, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.rule import Axis, AxisName, Role, Rule, Source, StoredTensor, StridedRows, stored_shape, stored_tensors
from windlass.core.scheme import Keep

pytestmark = pytest.mark.pure


def rule(*sources: Source, sizes: tuple[int, ...] = (6, 4), layers: tuple[int, ...] | None = None, experts: int = 0) -> Rule:
    axes = tuple(Axis(name=AxisName.HIDDEN, count=size) for size in sizes)
    return Rule(ours="x", axes=axes, sources=sources, keep=Keep.QUANTIZE, role=Role.MATRIX, layers=layers, num_experts=experts)


def test_rows_by_hand() -> None:
    """Two queries of 3, then a key of 3, then a value of 3, twice over."""
    queries, keys = StridedRows(block=6, stride=12, offset=0), StridedRows(block=3, stride=12, offset=6)
    assert [queries.stored(row) for row in range(12)] == [0, 1, 2, 3, 4, 5, 12, 13, 14, 15, 16, 17]
    assert [keys.stored(row) for row in range(6)] == [6, 7, 8, 18, 19, 20]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 6))
def test_blocks_side_by_side_tile(blocks: list[int], repeats: int) -> None:
    stride = sum(blocks)
    parts = [StridedRows(block=size, stride=stride, offset=sum(blocks[:index])) for index, size in enumerate(blocks)]
    read = [part.stored(row) for part in parts for row in range(part.block * repeats)]
    assert sorted(read) == list(range(stride * repeats))


def test_shapes() -> None:
    assert stored_shape(rule(), Source(name="a")) == (6, 4)
    assert stored_shape(rule(), Source(name="a", transposed=True)) == (4, 6)
    assert stored_shape(rule(), Source(name="a", fused_rows=18)) == (18, 4)
    assert stored_shape(rule(), Source(name="a", fused_rows=18, transposed=True)) == (4, 18)
    assert stored_shape(rule(experts=5), Source(name="a", stacked=True, fused_rows=12, transposed=True)) == (5, 4, 12)
    assert stored_shape(rule(sizes=(6,)), Source(name="a", fused_rows=18)) == (18,)


def test_sizes() -> None:
    heads = Axis(name=AxisName.HEADS, count=6, unit=10)
    assert heads.size == 60
    axes = (heads, Axis(name=AxisName.HIDDEN, count=4))
    made = Rule(ours="x", axes=axes, sources=(), keep=Keep.HIGH, role=Role.MATRIX, layers=(0, 2), num_experts=3)
    assert (made.shape, made.elements, made.copies) == ((60, 4), 240, 6)
    assert made.in_layer(2) and not made.in_layer(1)
    assert rule().copies == 1 and not rule().in_layer(0)


def test_stored_tensors_are_listed_once() -> None:
    """Three rules on one fused tensor; experts apart or stacked, as the choice says."""
    fused = [rule(Source(name="l.{layer}.qkv", fused_rows=18), layers=(0, 1)) for _ in range(3)]
    expert = rule(Source(name="l.{layer}.e.{expert}"), Source(name="l.{layer}.e", stacked=True), layers=(1,), experts=2)
    listed = list(stored_tensors((*fused, expert)))
    assert listed == [
        StoredTensor(name="l.0.qkv", shape=(18, 4)),
        StoredTensor(name="l.1.qkv", shape=(18, 4)),
        StoredTensor(name="l.1.e.0", shape=(6, 4)),
        StoredTensor(name="l.1.e.1", shape=(6, 4)),
    ]
    assert list(stored_tensors((*fused, expert), choice=1))[2:] == [StoredTensor(name="l.1.e", shape=(2, 6, 4))]


def test_blocks_and_scales() -> None:
    """MXFP4: 32 inputs are 16 bytes and one scale."""
    made = rule(Source(name="e", stacked=True, encoding="mxfp4"), sizes=(6, 64), experts=2)
    assert list(stored_tensors((made,))) == [
        StoredTensor(name="e_blocks", shape=(2, 6, 2, 16)),
        StoredTensor(name="e_scales", shape=(2, 6, 2)),
    ]
