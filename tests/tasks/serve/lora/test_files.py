"""Files of adapters come from where they may, are what they should be, and are no larger than that."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from windlass.errors import BadInput
from windlass.tasks.serve.lora import files
from windlass.tasks.serve.lora.files import CONFIG, NAME, WEIGHTS, take_adapter

pytestmark = pytest.mark.pure


def written(folder: Path, config: bytes = b"{}", weights: bytes = b"weights") -> Path:
    folder.mkdir(parents=True)
    (folder / CONFIG).write_bytes(config)
    (folder / WEIGHTS).write_bytes(weights)
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    written(tmp_path / "allowed" / "tone")
    written(tmp_path / "outside")
    return tmp_path / "allowed"


@pytest.mark.parametrize("whole", [False, True])
def test_an_adapter_is_copied(root: Path, tmp_path: Path, whole: bool) -> None:
    (root / "tone" / "adapter_model.bin").write_bytes(b"pickled")
    taken = tmp_path / "kept" / "1" / "tone"
    assert take_adapter(root, str(root / "tone") if whole else "tone", taken) == len(b"weights")
    assert sorted(path.name for path in taken.iterdir()) == [CONFIG, WEIGHTS]
    (root / "tone" / WEIGHTS).write_bytes(b"changed later")
    assert (taken / WEIGHTS).read_bytes() == b"weights"


@pytest.mark.parametrize(
    "given", ["../outside", "tone/../../outside", "/etc", "", "nowhere", "tone\0", "tone/" + CONFIG, "x" * 5000, "~"]
)
def test_nothing_outside_is_taken(root: Path, tmp_path: Path, given: str) -> None:
    with pytest.raises(BadInput) as refused:
        take_adapter(root, given, tmp_path / "kept")
    assert str(tmp_path) not in str(refused.value)
    assert not (tmp_path / "kept").exists()


def test_links_lead_nowhere_else(root: Path, tmp_path: Path) -> None:
    (root / "linked").symlink_to(tmp_path / "outside")
    with pytest.raises(BadInput, match="below"):
        take_adapter(root, "linked", tmp_path / "a")
    (root / "tone" / WEIGHTS).unlink()
    (root / "tone" / WEIGHTS).symlink_to(tmp_path / "outside" / WEIGHTS)
    with pytest.raises(BadInput, match="links to outside"):
        take_adapter(root, "tone", tmp_path / "b")
    (root / "tone" / WEIGHTS).unlink()
    (root / "blob").write_bytes(b"a file of the hub's cache")
    (root / "tone" / WEIGHTS).symlink_to("../blob")
    assert take_adapter(root, "tone", tmp_path / "c") == 25


def test_a_pipe_is_not_waited_for(root: Path, tmp_path: Path) -> None:
    (root / "tone" / CONFIG).unlink()
    os.mkfifo(root / "tone" / CONFIG)
    with pytest.raises(BadInput, match="not a plain file"):
        take_adapter(root, "tone", tmp_path / "kept")


def test_sizes_are_bounded(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(files.MAX_BYTES, WEIGHTS, 3)
    with pytest.raises(BadInput, match="at most"):
        take_adapter(root, "tone", tmp_path / "kept")


def test_other_formats_are_not_read(root: Path, tmp_path: Path) -> None:
    (root / "tone" / WEIGHTS).rename(root / "tone" / "adapter_model.bin")
    with pytest.raises(BadInput, match="safetensors"):
        take_adapter(root, "tone", tmp_path / "kept")


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a:b", "-x", "a b", "a\n", "x" * 65, "é"])
def test_names_are_plain(name: str) -> None:
    assert not NAME.fullmatch(name)
