"""Shards that were damaged after they were made: found as they are read, and named. And those of earlier versions, which have no checksums."""

from __future__ import annotations

from pathlib import Path
from zlib import crc32

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_shards import make_shards, numbered

from windlass.core.recipe.sections import DataSection, DataSource
from windlass.errors import BadInput
from windlass.tasks.train.data.batches import Batches, open_batches
from windlass.tasks.train.data.checksums import BLOCK_BYTES, BlockChecksums
from windlass.tasks.train.data.prepare.write_shards import write_manifest
from windlass.tasks.train.data.shards import BLOCKS, find_damage, read_manifest

pytestmark = pytest.mark.cpu

LENGTH = 64
TOKENS_PER_BLOCK = BLOCK_BYTES // 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three blocks and a part of one, and masks."""
    documents = [(tokens, [(1, len(tokens) - 1)]) for tokens, _ in numbered([1000] * 50)]
    return make_shards(tmp_path / "shards", [documents])


def opened(folder: Path, **options: int) -> Batches:
    section = DataSection(sources=(DataSource(path=str(folder)),), sequence_length=LENGTH)
    return open_batches(section, folder, **options)  # type: ignore[arg-type]


def read_all(batches: Batches) -> None:
    batches.batch(0, batches.num_samples_per_epoch)


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 0x10
    file.write_bytes(content)


@pytest.mark.parametrize("place", [0, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES, -200])
def test_a_changed_token_is_one_line(folder: Path, place: int) -> None:
    read_all(opened(folder))
    file = folder / "train-00000.tokens.bin"
    flip(file, place)
    with pytest.raises(BadInput) as caught:
        read_all(opened(folder))
    block = (file.stat().st_size + place if place < 0 else place) // BLOCK_BYTES
    said = str(caught.value)
    assert said.startswith(
        f"the shard {file} is damaged: byte {block * BLOCK_BYTES:,} or one of the {BLOCK_BYTES:,} after it has changed; "
    )
    assert f"`windlass train data {folder} --verify`" in said and "\n" not in said


@pytest.mark.parametrize("ending", ["documents.bin", "learned.bin", "blocks.bin"])
def test_the_small_files_are_checked_as_a_whole(folder: Path, ending: str) -> None:
    flip(folder / f"train-00000.{ending}", 9)
    with pytest.raises(
        BadInput, match=rf"the shard .*train-00000\.{ending} is damaged: its checksum differs from the manifest; find all"
    ):
        read_all(opened(folder))
    (line,) = find_damage(folder, read_manifest(folder))
    assert f"train-00000.{ending} is damaged" in line


def test_what_is_not_read_is_not_checked(folder: Path) -> None:
    """A run does not wait for checks of data that it will come to in a week."""
    flip(folder / "train-00000.tokens.bin", 0)
    batches = opened(folder)
    damaged = 0
    for sample in range(batches.num_samples_per_epoch):
        try:
            batches.batch(sample, 1)
        except BadInput:
            damaged += 1
    assert damaged == TOKENS_PER_BLOCK // LENGTH


def test_shards_of_earlier_versions(folder: Path) -> None:
    """They are read as before, and are the same data."""
    now = opened(folder)
    assert now.unchecked == ()
    expected = now.batch(0, 8).tokens
    manifest = read_manifest(folder)
    (shard,) = manifest.shards
    files = {ending: stored for ending, stored in shard.files.items() if ending != BLOCKS}
    old = msgspec.structs.replace(manifest, shards=(msgspec.structs.replace(shard, files=files),))
    write_manifest(folder, old)
    (folder / f"train-00000.{BLOCKS}").unlink()
    before = opened(folder)
    assert before.unchecked == (folder,) and before.fingerprint == now.fingerprint
    assert before.batch(0, 8).tokens.equal(expected)
    flip(folder / "train-00000.tokens.bin", 0)
    read_all(opened(folder))


def test_a_token_that_the_model_does_not_have(folder: Path) -> None:
    read_all(opened(folder, vocab_size=49_986))
    with pytest.raises(
        BadInput, match=r"train-00000\.tokens\.bin has the token 49,985, but the model's vocabulary is 49,985: find out"
    ):
        read_all(opened(folder, vocab_size=49_985))


@given(st.lists(st.integers(0, 3 * BLOCK_BYTES // 2), max_size=5))
def test_checksums_do_not_depend_on_the_pieces(sizes: list[int]) -> None:
    content = np.arange(sum(sizes), dtype=np.uint32).astype(np.uint8)
    checksums = BlockChecksums()
    for piece in np.split(content, np.cumsum(sizes)):
        checksums.update(piece.data)
    blocks = [content.tobytes()[place : place + BLOCK_BYTES] for place in range(0, len(content), BLOCK_BYTES)]
    assert checksums.finish().tolist() == [crc32(block) for block in blocks]
