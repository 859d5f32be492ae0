"""A worker's cache: whole pieces or none, nothing asked for twice, within its size, and never in the way of who uses it."""

from __future__ import annotations

import errno
import io
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from windlass.errors import BadCheckpoint, DoesNotFit
from windlass.runtime.fleet.transfer.cache import CacheEntry, WeightCache
from windlass.runtime.weights.tensors.slices import Slice
from windlass.runtime.weights.transfer.pieces import Catalogue, CheckpointPiece, TensorHeader, checksum

pytestmark = pytest.mark.cpu

ROWS, WIDTH = 64, 256
"""Of a matrix of bytes: 16 KiB."""


def catalogue(key: str = "one") -> Catalogue:
    tensors = (TensorHeader(name="matrix", dtype="U8", shape=(ROWS, WIDTH)), TensorHeader(name="vector", dtype="F32", shape=(8,)))
    return Catalogue(key=key, name="tiny", config={}, kind="hf", tensors=tensors)


def rows(first: int, last: int, columns: tuple[int, int] = (0, WIDTH)) -> Slice:
    return Slice(name="matrix", rows=(first, last), columns=columns)


def piece(*slices: Slice) -> CheckpointPiece:
    data = b"".join(bytes(row + column & 255 for row in range(*one.rows) for column in range(*one.columns)) for one in slices)
    return CheckpointPiece(slices=slices, data=data, checksum=checksum(slices, data))


WHOLE = [rows(0, ROWS)]


def test_what_was_kept_is_not_missing(tmp_path: Path) -> None:
    with WeightCache(tmp_path).using(catalogue()) as use:
        assert use.missing(WHOLE) == WHOLE
        use.keep(piece(rows(0, 16), rows(32, 40)))
        assert use.missing(WHOLE) == [rows(16, 32), rows(40, 64)]
        assert use.num_bytes(use.missing(WHOLE)) == 40 * WIDTH
    with WeightCache(tmp_path).using(catalogue()) as use:  # and after a start
        assert use.missing(WHOLE) == [rows(16, 32), rows(40, 64)]


def test_a_new_cut_asks_for_what_is_not_there(tmp_path: Path) -> None:
    """Rows of one epoch, columns of the next."""
    with WeightCache(tmp_path).using(catalogue()) as use:
        use.keep(piece(rows(0, 32)))
        assert use.missing([rows(0, 64, (0, 128))]) == [rows(32, 64, (0, 128))]
        use.keep(piece(rows(32, 64, (0, 128))))
        assert use.missing(WHOLE) == [rows(32, 64, (128, 256))]
        assert use.store([rows(0, 64, (0, 128))]) == str(use.folder)


def test_keys_do_not_meet(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path)
    with cache.using(catalogue("one")) as one, cache.using(catalogue("two")) as two:
        one.keep(piece(*WHOLE))
        assert one.missing(WHOLE) == [] and two.missing(WHOLE) == WHOLE


@pytest.mark.parametrize("damage", ["data", "place"])
def test_other_bytes_are_refused(tmp_path: Path, damage: str) -> None:
    good = piece(rows(0, 8))
    changed: dict[str, Any] = (
        {"data": bytes([good.data[0] ^ 1]) + good.data[1:]} if damage == "data" else {"slices": (rows(8, 16),)}
    )
    with WeightCache(tmp_path).using(catalogue()) as use:
        with pytest.raises(BadCheckpoint, match="checksum"):
            use.keep(msgspec.structs.replace(good, **changed))
        assert use.missing([rows(0, 16)]) == [rows(0, 16)]
        assert list(use.folder.glob("*.piece")) == []


@pytest.mark.parametrize("wrong", [rows(60, 70), rows(0, 2, (0, 300)), Slice(name="other", rows=(0, 1), columns=(0, 4))])
def test_what_is_no_part_of_the_checkpoint_is_refused(tmp_path: Path, wrong: Slice) -> None:
    with WeightCache(tmp_path).using(catalogue()) as use, pytest.raises(BadCheckpoint):
        use.keep(piece(wrong))


def test_half_a_piece_is_none(tmp_path: Path) -> None:
    with WeightCache(tmp_path).using(catalogue()) as use:
        use.keep(piece(rows(0, 16)))
        (file,) = use.folder.glob("*.piece")
    file.write_bytes(file.read_bytes()[:-100])
    with WeightCache(tmp_path).using(catalogue()) as use:
        assert use.missing([rows(0, 16)]) == [rows(0, 16)]


def test_after_a_start_of_the_machine_pieces_are_checked(tmp_path: Path) -> None:
    with WeightCache(tmp_path).using(catalogue()) as use:
        use.keep(piece(rows(0, 16)))
        use.keep(piece(rows(16, 32)))
        file = use.folder / piece(rows(0, 16)).file_name
    file.write_bytes(file.read_bytes()[:-100] + bytes(100))  # of the right length: what a lost write leaves
    with WeightCache(tmp_path).using(catalogue()) as use:
        assert use.missing([rows(0, 32)]) == [], "the same start: not looked at again"
    (tmp_path / "one" / ".boot").write_text("another")
    with WeightCache(tmp_path).using(catalogue()) as use:
        assert use.missing([rows(0, 32)]) == [rows(0, 16)]


def test_what_was_left_half_written_goes(tmp_path: Path) -> None:
    WeightCache(tmp_path).using(catalogue()).close()
    stale, fresh = tmp_path / "one" / ".7-0.part", tmp_path / "one" / ".8-0.part"
    stale.write_bytes(b"half")
    fresh.write_bytes(b"half")
    os.utime(stale, (1, 1))
    WeightCache(tmp_path).using(catalogue()).close()
    assert fresh.exists() and not stale.exists()


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with WeightCache(tmp_path).using(catalogue()) as use, pytest.raises(BadCheckpoint, match=r"tensor matrix: 16 KiB"):
        use.store(WHOLE)


def filled(cache: WeightCache, key: str) -> CacheEntry:
    use = cache.using(catalogue(key))
    use.make_room(WHOLE)
    use.keep(piece(*WHOLE))
    return use


def test_the_least_recently_used_makes_room(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, limit_bytes=40_000)  # of three, two and a little
    for number, key in enumerate(("old", "older")):
        filled(cache, key).close()
        then = time.time() - 100 * (number + 1)
        os.utime(tmp_path / key / ".used", (then, then))
    filled(cache, "new").close()
    assert {path.name for path in tmp_path.iterdir()} == {"old", "new"}
    assert cache.num_bytes() < 40_000


def test_who_is_in_use_stays(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, limit_bytes=20_000)
    with filled(cache, "one"):
        with pytest.raises(DoesNotFit, match="--cache-size") as raised:
            filled(cache, "two")
        assert 10_000 < raised.value.short_bytes < 20_000
        assert "\n" not in str(raised.value)
    filled(cache, "two").close()
    assert not (tmp_path / "one").exists()


def test_other_slices_of_the_same_checkpoint_make_room(tmp_path: Path) -> None:
    cache = WeightCache(tmp_path, limit_bytes=14_000)
    with cache.using(catalogue()) as use:
        use.keep(piece(rows(0, 16)))
        use.keep(piece(rows(16, 40)))
        wanted = [rows(16, 64)]
        use.make_room(wanted)
        assert use.missing([rows(0, 40)]) == [rows(0, 16)], "what the new cut does not want is gone"
        with cache.using(catalogue()), pytest.raises(DoesNotFit):
            use.make_room([rows(0, 16), rows(40, 64)])


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use = WeightCache(tmp_path).using(catalogue())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    class Full(io.FileIO):
        writelines = full

    monkeypatch.setattr(Path, "open", lambda self, *_: Full(self, "w"))
    with pytest.raises(DoesNotFit, match="disk full"):
        use.keep(piece(*WHOLE))
    monkeypatch.undo()
    assert use.missing(WHOLE) == WHOLE
    assert [path.name for path in use.folder.iterdir() if path.name.endswith(".part")] == []
    use.close()


def test_two_at_once(tmp_path: Path) -> None:
    """Two workers of one machine with one cache, or two epochs."""
    with WeightCache(tmp_path).using(catalogue()) as one, WeightCache(tmp_path).using(catalogue()) as other:
        one.keep(piece(rows(0, 32)))
        assert other.missing(WHOLE) == [rows(32, 64)]
        other.keep(piece(rows(0, 32)))
        other.keep(piece(rows(32, 64)))
        assert one.missing(WHOLE) == []
        assert len(list(one.folder.glob("*.piece"))) == 2
