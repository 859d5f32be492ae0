"""Checkpoints of one process: what is kept, what is refused, and what a full or damaged disk does."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from windlass.errors import BadCheckpoint, BadInput
from windlass.tasks.train.checkpoint import CheckpointIdentity, Checkpoints
from windlass.tasks.train.checkpoint import folder as folders
from windlass.tasks.train.checkpoint.host_copy import HostCopy
from windlass.tasks.train.checkpoint.manifest import MANIFEST

pytestmark = pytest.mark.cpu

IDENTITY = CheckpointIdentity(model="made up", spec="1")
ROOT = Path(__file__).parents[4]


def state(value: float, skipped: list[list[int]] | None = None) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((4, 3), value), "bias": torch.tensor(value)},
        "optimizer": {"state": {"weight": {"step": torch.tensor(value)}}, "param_groups": [{"lr": value, "betas": (0.9, 0.95)}]},
        "progress": {"step": int(value), "skipped": skipped or []},
        "rng": {"0": torch.get_rng_state()},
    }


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def run(tmp_path: Path, said: list[str]) -> Any:
    checkpoints = Checkpoints(tmp_path / "run", IDENTITY, keep_last=2, notify=said.append)
    yield checkpoints
    checkpoints.close()


# --- there and back ---------------------------------------------------------------------------------------------------


def test_everything_comes_back(run: Checkpoints) -> None:
    run.save(7, state(7.0, [[3, 5]]), wait=True)
    into = state(0.0)
    assert run.load(into) == 7
    expected = state(7.0, [[3, 5]])
    assert torch.equal(into["model"]["weight"], expected["model"]["weight"])
    assert torch.equal(into["optimizer"]["state"]["weight"]["step"], torch.tensor(7.0))
    assert into["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    assert into["progress"] == expected["progress"]


def test_what_is_saved_is_the_state_when_it_was_asked_for(run: Checkpoints) -> None:
    held = state(1.0)
    run.save(1, held)
    held["model"]["weight"].fill_(9.0)
    held["progress"]["skipped"].append([1, 2])
    run.wait()
    into = state(0.0)
    run.load(into)
    assert torch.equal(into["model"]["weight"], torch.full((4, 3), 1.0))
    assert into["progress"]["skipped"] == []


def test_a_step_that_is_saved_again_replaces_the_first(run: Checkpoints) -> None:
    run.save(5, state(5.0), wait=True)
    run.save(5, state(6.0), wait=True)
    into = state(0.0)
    assert run.load(into) == 5 and into["progress"]["step"] == 6
    assert sorted(path.name for path in run.folder.iterdir()) == [".lock", "step-00000005"]


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_the_last_and_milestones_are_kept(tmp_path: Path) -> None:
    run = Checkpoints(tmp_path / "run", IDENTITY, keep_last=2, milestone_every=4)
    for step in range(1, 8):
        run.save(step, state(step))
    run.wait()
    assert run.steps() == [4, 6, 7] and run.latest() == 7
    run.close()


@given(st.sets(st.integers(0, 10**9), max_size=30), st.integers(1, 5), st.integers(0, 7))
def test_what_is_removed(steps: set[int], keep_last: int, milestone_every: int) -> None:
    gone = folders.to_remove(steps, keep_last, milestone_every)
    kept = steps - set(gone)
    assert set(sorted(steps)[-keep_last:]) <= kept
    assert all(step in kept for step in steps if milestone_every and step % milestone_every == 0)
    assert len(kept) <= keep_last + sum(1 for step in steps if milestone_every and step % milestone_every == 0)
    assert set(gone) <= steps


def test_what_a_killed_run_left_is_cleared(tmp_path: Path, said: list[str]) -> None:
    folder = tmp_path / "run"
    run = Checkpoints(folder, IDENTITY)
    run.save(1, state(1.0), wait=True)
    run.save(2, state(2.0), wait=True)
    run.close()
    (folder / "step-00000003.tmp").mkdir()
    (folder / "step-00000002").rename(folder / "step-00000002.old")  # ended between two renames: this one was whole
    shutil.copytree(folder / "step-00000001", folder / "step-00000000.gone")
    run = Checkpoints(folder, IDENTITY, notify=said.append)
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "step-00000001", "step-00000002"]
    assert run.latest() == 2 and len(said) == 3
    run.close()


def test_two_runs_do_not_share_a_folder(run: Checkpoints) -> None:
    with pytest.raises(BadInput, match="another run is writing to"):
        Checkpoints(run.folder, IDENTITY)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_another_model_is_refused_in_one_line(run: Checkpoints) -> None:
    run.save(1, state(1.0), wait=True)
    folder = run.folder
    run.close()
    other = Checkpoints(folder, CheckpointIdentity(model="other", spec="2"))
    with pytest.raises(BadInput, match="is a checkpoint of made up, not of the recipe's other") as caught:
        other.load(state(0.0))
    assert "\n" not in str(caught.value)
    other.close()


def test_other_data_is_told_of(run: Checkpoints, said: list[str]) -> None:
    run.identity = CheckpointIdentity(model="made up", spec="1", data="first")
    run.save(1, state(1.0), wait=True)
    run.load(state(0.0))
    assert said == []
    run.identity = CheckpointIdentity(model="made up", spec="1", data="second")
    run.load(state(0.0))
    assert said == ["the data differs from that of the checkpoint: sample numbers now refer to other samples"]


def test_nothing_to_go_on_from(run: Checkpoints) -> None:
    with pytest.raises(BadInput, match="has no checkpoint to resume from"):
        run.load(state(0.0))
    run.save(1, state(1.0), wait=True)
    with pytest.raises(BadInput, match="has no checkpoint of step 9 to resume from"):
        run.load(state(0.0), step=9)


def test_a_part_that_the_checkpoint_does_not_have(run: Checkpoints) -> None:
    run.save(1, state(1.0), wait=True)
    into = state(0.0)
    into["model"]["more"] = torch.zeros(2)
    with pytest.raises(BadCheckpoint, match=r"has no model\.more; it was made with another recipe"):
        run.load(into)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", MANIFEST])
@pytest.mark.parametrize("how", ["flip", "cut", "remove"])
def test_a_damaged_one_is_left_out_with_a_word(run: Checkpoints, said: list[str], name: str, how: str) -> None:
    run.save(1, state(1.0), wait=True)
    run.save(2, state(2.0), wait=True)
    file = run.path(2) / name
    content = bytearray(file.read_bytes())
    if how == "flip":
        content[len(content) // 2] ^= 0x80
        file.write_bytes(content)
    elif how == "cut":
        file.write_bytes(content[: len(content) // 2])
    else:
        file.unlink()
    into = state(0.0)
    assert run.load(into) == 1 and into["progress"]["step"] == 1
    assert len(said) == 1 and said[0].startswith("skipping the checkpoint of step 2: ") and "\n" not in said[0]
    with pytest.raises(BadCheckpoint):
        run.load(into, step=2)


class Payload:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.path),)


@pytest.mark.parametrize("part", ["contents", "value"])
def test_a_checkpoint_runs_no_code(run: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """One with right checksums, made by somebody who means ill."""
    ran = tmp_path / "ran"
    held = state(1.0)
    monkeypatch.setattr(HostCopy, "take", lambda _, state: state)
    if part == "value":
        held["progress"]["step"] = Payload(str(ran))
    run.save(1, held, wait=True)
    if part == "contents":
        (run.path(1) / ".metadata").write_bytes(pickle.dumps(Payload(str(ran))))
        _sign(run.path(1), ".metadata")
    with pytest.raises(BadCheckpoint, match=r"it contains|plain values"):
        run.load(state(0.0))
    assert not ran.exists()


def _sign(folder: Path, name: str) -> None:
    from windlass.tasks.train.checkpoint.manifest import file_digest

    found = file_digest(folder / name)
    manifest = json.loads((folder / MANIFEST).read_bytes())
    manifest["files"][name] = {"num_bytes": found.num_bytes, "sha256": found.sha256}
    (folder / MANIFEST).write_text(json.dumps(manifest))


# --- a disk that is full ----------------------------------------------------------------------------------------------

FULL = """
import sys, torch
from pathlib import Path
from windlass.tasks.train.checkpoint import CheckpointIdentity, Checkpoints

run = Checkpoints(Path(sys.argv[1]) / "run", CheckpointIdentity(model="m", spec="1"), notify=lambda text: print("said", text))
for step, size in ((1, 100), (2, 2_000_000), (3, 100)):
    run.save(step, {"model": {"weight": torch.zeros(size)}}, wait=True)
    print(step, run.steps(), run.num_failed, sorted(path.name for path in run.folder.iterdir()))
"""


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["unshare", "-rm", "sh", "-c"]
    script = 'mount -t tmpfs -o size=2m none "$1" && exec "$2" -c "$3" "$1"'
    if (
        shutil.which("unshare") is None
        or subprocess.run([*mount, 'mount -t tmpfs none "$1"', "sh", str(small)], check=False).returncode
    ):
        pytest.skip("no mount namespaces here")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*mount, script, "sh", str(small), sys.executable, FULL], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "1 [1] 0 ['.lock', 'step-00000001']",
        "said the checkpoint of step 2 could not be saved, training continues: No space left on device",
        "2 [1] 1 ['.lock', 'step-00000001']",
        "3 [1, 3] 1 ['.lock', 'step-00000001', 'step-00000003']",
    ]


def test_a_mistake_of_the_program_is_raised(run: Checkpoints) -> None:
    with pytest.raises(AttributeError, match="pickle"):
        run.save(1, {"model": {"weight": lambda: None}}, wait=True)


def test_what_a_killed_run_left_on_a_local_disk_goes(tmp_path: Path) -> None:
    """What a rank has listed stays: it may yet be brought together."""
    local = tmp_path / "local"
    for name in ("step-00000001.tmp/__0_0.distcp", "step-00000002.tmp/__0_0.distcp", "step-00000002.tmp/__0.parts.json"):
        (local / name).parent.mkdir(parents=True, exist_ok=True)
        (local / name).write_bytes(b"x")
    held = Checkpoints(tmp_path / "run", CheckpointIdentity(model="tiny", spec="1"))
    with pytest.raises(BadInput, match="another run is writing"):
        Checkpoints(tmp_path / "run", CheckpointIdentity(model="tiny", spec="1"), local=local)
    assert len(list(local.iterdir())) == 2
    held.close()
    Checkpoints(tmp_path / "run", CheckpointIdentity(model="tiny", spec="1"), local=local).close()
    assert [path.name for path in local.iterdir()] == ["step-00000002.tmp"]
