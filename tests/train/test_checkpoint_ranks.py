"""Checkpoints of several processes: cut by one world size and put together at another."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import checkpoint_ranks as ranks

pytestmark = pytest.mark.multi


@pytest.mark.parametrize(("saving", "loading"), [(2, 1), (1, 4), (2, 3)])
def test_another_world_size(tmp_path: Path, saving: int, loading: int) -> None:
    (tmp_path / "saved_by").write_text(str(saving))
    assert ranks.exit_codes(saving, ranks.save, str(tmp_path)) == [0] * saving
    written = sorted(path.name for path in (tmp_path / "run" / "step-00000003").iterdir())
    assert written == [".metadata", *(f"__{rank}_0.distcp" for rank in range(saving)), "manifest.json"]
    assert ranks.exit_codes(loading, ranks.load, str(tmp_path)) == [0] * loading


def test_parts_on_local_disks_are_brought_together(tmp_path: Path) -> None:
    (tmp_path / "saved_by").write_text("2")
    local = tmp_path / "local"
    assert ranks.exit_codes(2, ranks.save, str(tmp_path), str(local)) == [0, 0]
    assert [path for path in local.rglob("*") if path.is_file()] == []
    assert ranks.exit_codes(1, ranks.load, str(tmp_path)) == [0]


def test_a_disk_that_is_full_on_one_rank(tmp_path: Path) -> None:
    assert ranks.exit_codes(2, ranks.fill_one_disk, str(tmp_path)) == [0, 0]
