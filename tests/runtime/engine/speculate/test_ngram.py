from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.runtime.engine.speculate.ngram import LONGEST, NgramIndex, lookup

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("tokens", "count", "drafted"),
    [
        ([], 4, ()),
        ([1], 4, ()),
        ([1, 2, 3, 4], 4, ()),
        ([1, 2, 3, 4, 1, 2], 2, (3, 4)),
        ([1, 2, 3, 4, 1, 2], 6, (3, 4, 1, 2, 3, 4)),  # goes on as if it repeated itself
        ([1, 2, 7, 1, 2, 8, 1, 2], 1, (8,)),  # the latest occurrence
        ([5, 1, 2, 7, 1, 2, 8, 5, 1, 2], 1, (7,)),  # of the longest match
        ([3, 9, 3], 1, ()),  # one token is not enough
    ],
)
def test_what_followed_before_is_drafted(tokens: list[int], count: int, drafted: tuple[int, ...]) -> None:
    assert lookup(tokens, count) == drafted


@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 9), st.lists(st.integers(1, 5), max_size=20))
def test_the_index_answers_as_a_scan_would(tokens: list[int], count: int, steps: list[int]) -> None:
    index, length = NgramIndex(), 0
    for step in [*steps, len(tokens)]:
        length = min(length + step, len(tokens))
        assert index.draft(tokens[:length], count) == lookup(tokens[:length], count)


@given(st.lists(st.integers(0, 3), min_size=LONGEST, max_size=LONGEST), st.lists(st.integers(4, 9), min_size=1, max_size=12))
def test_a_passage_that_is_copied_is_drafted_to_its_end(quoted: list[int], following: list[int]) -> None:
    text = [*quoted, *following, 99, *quoted]
    assert lookup(text, len(following)) == tuple(following)
