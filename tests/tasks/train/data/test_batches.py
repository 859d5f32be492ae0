"""Samples: all of them once an epoch, in an order that depends on nothing but the seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_shards import Document, make_shards, numbered

from windlass.core.recipe.sections import DataSection, DataSource
from windlass.errors import BadInput
from windlass.tasks.train.data.batches import PackedBatch, open_batches

pytestmark = pytest.mark.cpu

IGNORED = -100


def section(*paths: str, length: int = 8, weights: Sequence[float] | None = None, **values: Any) -> DataSection:
    given_weights = weights or [None] * len(paths)
    sources = tuple(DataSource(path=path, weight=weight) for path, weight in zip(paths, given_weights, strict=True))
    return DataSection(sources=sources, sequence_length=length, **values)


def reference(documents: Sequence[Document], batch: PackedBatch) -> None:
    """Every row, token by token, against the documents: tokens are all different, so each tells where it is from."""
    place = {token: (number, index) for number, (tokens, _) in enumerate(documents) for index, token in enumerate(tokens)}
    learned = {
        token
        for tokens, runs in documents
        for index, token in enumerate(tokens)
        if runs is None or any(begin <= index < end for begin, end in runs)
    }
    for row in range(len(batch.tokens)):
        tokens, targets, positions, numbers = (part[row].tolist() for part in batch)
        begin = 0
        for index, token in enumerate(tokens):
            is_new = index > 0 and (place.get(token, (-1,))[0] != place.get(tokens[index - 1], (-1,))[0])
            begin = index if is_new else begin
            assert positions[index] == index - begin
            assert index == 0 or numbers[index] == numbers[index - 1] + is_new
            if token not in place:
                assert token == 0 and targets[index] == IGNORED
                continue
            number, at = place[token]
            following = documents[number][0][at + 1] if at + 1 < len(documents[number][0]) else None
            assert targets[index] == (following if following in learned else IGNORED)
        assert numbers[0] == 0


def real_tokens(batch: PackedBatch) -> list[int]:
    return [token for token in batch.tokens.flatten().tolist() if token]


lengths = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=12), min_size=1, max_size=3)


@given(lengths=lengths, length=st.integers(2, 12), seed=st.integers(0, 9))
def test_whole_documents_every_token_once_an_epoch(lengths: list[list[int]], length: int, seed: int) -> None:
    shards, first = [], 1
    for each in lengths:
        shards.append(numbered(each, first))
        first += sum(each)
    with TemporaryDirectory() as folder:
        make_shards(Path(folder) / "a", shards)
        batches = open_batches(section("a", length=length, seed=seed, packing="whole"), Path(folder))
        for epoch in range(2):
            batch = batches.batch(epoch * batches.num_samples_per_epoch, batches.num_samples_per_epoch)
            assert sorted(real_tokens(batch)) == list(range(1, first))
            reference([document for shard in shards for document in shard], batch)
            for row in batch.tokens.tolist():  # cut only where a document is longer than a row
                for documents in shards:
                    for tokens, _ in documents:
                        if len(tokens) <= length and set(tokens) & set(row):
                            assert set(tokens) <= set(row)


@given(lengths=lengths, length=st.integers(2, 12), seed=st.integers(0, 9))
def test_cut_documents_every_token_once_but_the_dropped_tail(lengths: list[list[int]], length: int, seed: int) -> None:
    shards, first, expected = [], 1, []
    for each in lengths:
        shards.append(numbered(each, first))
        expected += range(first, first + sum(each) // length * length)
        first += sum(each)
    with TemporaryDirectory() as folder:
        make_shards(Path(folder) / "a", shards)
        if not expected:
            with pytest.raises(BadInput, match="shorter than one row"):
                open_batches(section("a", length=length), Path(folder))
            return
        batches = open_batches(section("a", length=length, seed=seed), Path(folder))
        batch = batches.batch(3 * batches.num_samples_per_epoch, batches.num_samples_per_epoch)
        assert sorted(batch.tokens.flatten().tolist()) == expected
        reference([document for shard in shards for document in shard], batch)


@st.composite
def masked_documents(draw: st.DrawFn) -> list[Document]:
    documents: list[Document] = []
    first = 1
    for length in draw(st.lists(st.integers(1, 25), min_size=1, max_size=10)):
        edges = sorted(draw(st.sets(st.integers(0, length), max_size=6)))
        runs = list(zip(edges[::2], edges[1::2], strict=False))
        documents.append((range(first, first + length), draw(st.sampled_from([runs, None]))))
        first += length
    return documents


@given(documents=masked_documents(), length=st.integers(2, 12), packing=st.sampled_from(["cut", "whole"]))
def test_only_learned_tokens_are_targets(documents: list[Document], length: int, packing: Any) -> None:
    with TemporaryDirectory() as folder:
        make_shards(Path(folder) / "a", [documents])
        if packing == "cut" and sum(len(tokens) for tokens, _ in documents) < length:
            return
        batches = open_batches(section("a", length=length, packing=packing), Path(folder))
        reference(documents, batches.batch(0, batches.num_samples_per_epoch))


@pytest.fixture
def two(tmp_path: Path) -> Path:
    make_shards(tmp_path / "a", [numbered([5, 9, 30, 2, 17, 8] * 10), numbered([40] * 5, 1000)])
    make_shards(tmp_path / "b", [numbered([11] * 30, 5000)])
    return tmp_path


def equal(one: PackedBatch, other: PackedBatch) -> bool:
    return all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


def test_random_access_is_reading_in_order(two: Path) -> None:
    batches = open_batches(section("a", "b", weights=[1, 3]), two)
    total = 3 * batches.num_samples_per_epoch + 5
    whole = batches.batch(0, total)
    for first, count in ((0, 1), (17, 40), (total - 1, 1), (batches.num_samples_per_epoch - 2, 5), (90, 3)):
        alone = batches.batch(first, count)
        assert equal(alone, PackedBatch(*(part[first : first + count] for part in whole)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_ranks_together_see_what_one_sees(two: Path, ranks: int) -> None:
    """Step s gives rank r of d the samples s * g + r * g / d and on."""
    batches = open_batches(section("a", "b"), two)
    global_batch = 12
    for step in range(8):
        alone = batches.batch(step * global_batch, global_batch)
        share = global_batch // ranks
        parts = [open_batches(section("a", "b"), two).batch(step * global_batch + rank * share, share) for rank in range(ranks)]
        assert equal(alone, PackedBatch(*(torch.cat(each) for each in zip(*parts, strict=True))))


def test_epochs_have_the_same_rows_in_another_order(two: Path) -> None:
    batches = open_batches(section("a", "b"), two)
    size = batches.num_samples_per_epoch
    first, second = (list(map(tuple, batches.batch(epoch * size, size).tokens.tolist())) for epoch in (0, 1))
    assert sorted(first) == sorted(second)
    assert sum(one == other for one, other in zip(first, second, strict=True)) < size // 10
    assert first != sorted(first)


def test_seeds_give_other_orders(two: Path) -> None:
    size = open_batches(section("a"), two).num_samples_per_epoch
    orders = [open_batches(section("a", seed=seed), two).batch(0, size).tokens for seed in (0, 1, 2**62)]
    assert not torch.equal(orders[0], orders[1]) and not torch.equal(orders[0], orders[2])


def test_weights_are_kept_in_every_stretch(two: Path) -> None:
    batches = open_batches(section("a", "b", weights=[0.25, 0.75]), two)
    from_b = (batches.batch(0, 4 * batches.num_samples_per_epoch).tokens[:, 0] >= 5000).tolist()
    for first in range(len(from_b) - 40):
        assert 27 <= sum(from_b[first : first + 40]) <= 33


def test_a_source_that_is_drawn_more_often_is_read_through_evenly(two: Path) -> None:
    batches = open_batches(section("a", "b", weights=[0.1, 0.9]), two)
    tokens = batches.batch(0, 2 * batches.num_samples_per_epoch).tokens
    seen = Counter(tokens[tokens[:, 0] >= 5000][:, 0].tolist())
    assert len(seen) == 11 * 30 // 8
    assert max(seen.values()) - min(seen.values()) <= 1


def test_what_samples_depend_on_is_in_the_fingerprint(two: Path) -> None:
    prints = {
        open_batches(section(*paths, length=length, **values), two).fingerprint
        for paths, length, values in (
            (("a",), 8, {}),
            (("b",), 8, {}),
            (("a",), 16, {}),
            (("a",), 8, {"seed": 1}),
            (("a",), 8, {"packing": "whole"}),
            (("a", "b"), 8, {}),
            (("a", "b"), 8, {"weights": [1, 2]}),
        )
    }
    assert len(prints) == 7


def test_validation_is_held_out(tmp_path: Path) -> None:
    make_shards(tmp_path / "a", [numbered([20] * 10), numbered([20] * 4, 5000)], splits=["train", "validation"])
    make_shards(tmp_path / "b", [numbered([20] * 10, 9000)])
    held = open_batches(section("a", "b"), tmp_path, "validation")
    trained = open_batches(section("a", "b"), tmp_path)
    assert set(real_tokens(held.batch(0, held.num_samples_per_epoch))) == set(range(5000, 5080))
    assert not set(real_tokens(trained.batch(0, trained.num_samples_per_epoch))) & set(range(5000, 5080))
    with pytest.raises(BadInput, match="held out"):
        open_batches(section("b"), tmp_path, "validation")


def test_negative_samples_are_our_own_mistake(two: Path) -> None:
    with pytest.raises(ValueError, match="samples -1"):
        open_batches(section("a"), two).batch(-1, 2)


# --- damage ----------------------------------------------------------------------------------------------------------


def fails(folder: Path, word: str, *paths: str, **values: Any) -> None:
    with pytest.raises(BadInput, match=word) as raised:
        open_batches(section(*(paths or ("a",)), **values), folder)
    assert "\n" not in str(raised.value)


def test_a_missing_shard_is_one_line(two: Path) -> None:
    (two / "a" / "train-00001.tokens.bin").unlink()
    fails(two, r"cannot open the shard .*train-00001\.tokens\.bin: No such file")


def test_a_short_shard_is_one_line(two: Path) -> None:
    file = two / "a" / "train-00000.documents.bin"
    file.write_bytes(file.read_bytes()[:-3])
    fails(two, r"train-00000\.documents\.bin is damaged: 485 bytes instead of 488")


@pytest.mark.parametrize("content", [b"", b"{", b'{"tokenizer": 1}', b"\xff\xfe", b"[1]"])
def test_a_damaged_manifest_is_one_line(two: Path, content: bytes) -> None:
    (two / "a" / "manifest.json").write_bytes(content)
    fails(two, "is damaged")


def test_other_folders_are_one_line(two: Path) -> None:
    fails(two, "the directory does not exist", "nowhere")
    (two / "empty").mkdir()
    fails(two, r"there is no manifest\.json", "empty")
    make_shards(two / "c", [numbered([30])], tokenizer="another")
    fails(two, "different tokenizers", "a", "c")
    fails(two, "has no weight", "a", "b", weights=[1.0, None])
    fails(two, "positive finite number", "a", "b", weights=[1.0, -1.0])
    with pytest.raises(BadInput, match="has no data"):
        open_batches(DataSection(sequence_length=8), two)
    with pytest.raises(BadInput, match="sequence_length is missing"):
        open_batches(DataSection(sources=(DataSource(path="a"),)), two)
