from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.request import Request
from windlass.tasks.route.features.ngrams import NUM_FEATURES, counted, counts_of
from windlass.tasks.route.features.shape import NUM_SHAPE, shape_of
from windlass.tasks.route.features.sparse import MAX_COUNT, TERM
from windlass.tasks.route.features.text import HEAD_CHARACTERS, looked_at, text_of

pytestmark = pytest.mark.pure


@given(st.text(max_size=200))
def test_any_text_has_features_within_their_space(text: str) -> None:
    found = counted(text)
    assert all(0 <= feature < NUM_FEATURES and count > 0 for feature, count in found.items())
    shape = shape_of(text)
    assert shape.shape == (NUM_SHAPE,) and np.isfinite(shape).all()


def test_words_are_even_and_pairs_odd() -> None:
    found = counted("red blue red")
    assert sorted(count for feature, count in found.items() if feature % 2 == 0) == [1, 2]
    assert sum(count for feature, count in found.items() if feature % 2) == 2


def test_features_do_not_depend_on_the_process() -> None:
    assert sorted(counted("What is 2 + 2?"))[:2] == sorted(counted("what  IS 2 + 2?"))[:2]
    assert min(counted("hello")) == 42630  # crc32 of the word: a router's file is of these numbers


def test_the_whole_conversation_is_looked_at() -> None:
    parts = ({"type": "text", "text": "second"}, {"type": "image_url", "image_url": {}})
    request = Request(messages=({"role": "system", "content": "first"}, {"role": "user", "content": list(parts)}))
    assert text_of(request) == "first\nsecond"
    assert text_of(Request(prompt="plain")) == "plain" and text_of(Request(token_ids=(1, 2))) == ""


def test_a_long_text_is_cut_in_the_middle() -> None:
    text = "begin " + "x" * 50_000 + " end"
    seen = looked_at(text)
    assert len(seen) < 2 * HEAD_CHARACTERS + 2 and seen.startswith("begin") and seen.endswith("end")


@given(st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=6))
def test_sparse_products_are_those_of_the_dense_matrix(rows: list[list[int]]) -> None:
    texts = [" ".join(f"w{number}" for number in row) for row in rows]
    sparse = counts_of(texts)
    dense = np.zeros((len(sparse), NUM_FEATURES), dtype=np.float32)
    dense[np.repeat(np.arange(len(sparse)), sparse.lengths), sparse.columns] = TERM[sparse.counts]
    vector, random = (np.random.default_rng(0).normal(size=size).astype(np.float32) for size in (NUM_FEATURES, len(sparse)))
    assert np.allclose(sparse.times(vector), dense @ vector, atol=1e-4)
    assert np.allclose(sparse.transposed_times(random), dense.T @ random, atol=1e-4)
    chosen = np.arange(len(sparse))[::2]
    assert np.allclose(sparse.rows(chosen).times(vector), dense[chosen] @ vector, atol=1e-4)
    scale = np.where(np.arange(NUM_FEATURES) % 3 == 0, 0.0, 2.0).astype(np.float32)
    assert np.allclose(sparse.row_squares(scale), ((dense * scale) ** 2).sum(axis=1), atol=1e-4)
    is_counted = np.arange(len(sparse)) % 2 == 0
    assert np.array_equal(sparse.num_rows_with(is_counted), (dense[is_counted] > 0).sum(axis=0))


def test_blocks_hold_every_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("windlass.tasks.route.features.sparse.BLOCK_ENTRIES", 3)
    sparse = counts_of(["a b c d e", "", "f", "g h", ""])
    blocks = list(sparse.blocks())
    assert [place for rows, _ in blocks for place in range(rows.start, rows.stop)] == list(range(5)) and len(blocks) > 1
    assert [int(amount) for amount in sparse.times(np.ones(NUM_FEATURES, dtype=np.float32))] == [9, 0, 1, 3, 0]


def test_a_word_that_is_repeated_without_end_has_a_largest_count() -> None:
    assert counts_of(["x " * 3000]).counts.max() == MAX_COUNT
