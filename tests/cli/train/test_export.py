"""Which checkpoint `windlass train export` takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from windlass.errors import BadInput

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def _torch() -> None:
    pytest.importorskip("torch")


def a_checkpoint(folder: Path, step: int, fallback: str | None = None) -> Path:
    from windlass.tasks.train.checkpoint.manifest import CheckpointIdentity, CheckpointManifest, write_manifest

    recipe: dict[str, Any] = {"checkpoint": {"fallback": fallback}}
    place = folder / f"step-{step:08}"
    place.mkdir(parents=True)
    identity = CheckpointIdentity(model="m", spec="1", recipe=recipe)
    write_manifest(place, CheckpointManifest(identity=identity, step=step, world_size=1, files={}))
    return place


def chosen(folder: Path) -> Path:
    from windlass.cli.train.export import _step_folder

    return _step_folder(folder)


@pytest.mark.parametrize("is_absolute", [True, False])
def test_the_newest_of_both_folders_is_taken(tmp_path: Path, is_absolute: bool) -> None:
    """A run whose disk was full has gone on in its fallback."""
    second = tmp_path / "second"
    fallback = str(second) if is_absolute else "second"
    first = a_checkpoint(tmp_path / "run" / "checkpoints", 10, fallback)
    a_checkpoint(second, 5, fallback)
    assert chosen(tmp_path / "run") == first
    newer = a_checkpoint(second, 20, fallback)
    assert chosen(tmp_path / "run") == newer and chosen(tmp_path / "run" / "checkpoints") == newer
    assert chosen(tmp_path / "run" / "checkpoints" / first.name) == first, "as it was named"
    (newer / "manifest.json").unlink()
    assert chosen(tmp_path / "run") == first


def test_a_fallback_that_is_not_here_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = a_checkpoint(tmp_path / "run" / "checkpoints", 10, "/elsewhere/second")
    assert chosen(tmp_path / "run") == first
    assert "checkpoint.fallback /elsewhere/second is not" in capsys.readouterr().err
    a_checkpoint(tmp_path / "plain" / "checkpoints", 10)
    chosen(tmp_path / "plain")
    assert capsys.readouterr().err == ""
    with pytest.raises(BadInput, match="has no checkpoint"):
        chosen(tmp_path)
