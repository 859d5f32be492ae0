"""How a run of several processes ended: the outcome that its ranks leave, and what is said of those that leave none."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

pytest.importorskip("torch")

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from windlass.errors import NOT_SAVED, DoesNotFit
from windlass.tasks.train.loop.elastic import RunOutcome, _worst, begin_outcome, read_outcome, write_outcome

pytestmark = pytest.mark.cpu

FAILED = RunOutcome("failed", message="a damaged shard", exit_code=2)


def failed(tmp_path: Path, **codes: int) -> ChildFailedError:
    failures = {int(rank[1:]): ProcessFailure(int(rank[1:]), 1, code, str(tmp_path / "none")) for rank, code in codes.items()}
    return ChildFailedError("windlass", failures)


def test_the_first_error_is_the_reason(tmp_path: Path) -> None:
    begin_outcome(tmp_path)
    assert read_outcome(tmp_path) is None
    write_outcome(tmp_path, FAILED)
    write_outcome(tmp_path, RunOutcome("failed", message="what follows from it", exit_code=4))
    assert read_outcome(tmp_path) == FAILED
    begin_outcome(tmp_path)
    assert read_outcome(tmp_path) is None


def test_an_outcome_has_room_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_outcome(tmp_path)

    def full(path: Path, content: bytes) -> None:
        raise DoesNotFit("disk full", len(content))

    monkeypatch.setattr("windlass.tasks.train.loop.elastic.write_atomically", full)
    blocks = (tmp_path / "outcome.json").stat().st_size
    write_outcome(tmp_path, FAILED)
    assert read_outcome(tmp_path) == FAILED and (tmp_path / "outcome.json").stat().st_size == blocks


def test_an_outcome_that_cannot_be_written_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_outcome(tmp_path / "gone", FAILED)
    assert "a damaged shard" in capsys.readouterr().err


def test_a_rank_that_was_killed_is_the_reason(tmp_path: Path) -> None:
    """The others ended because they lost their connections to it."""
    outcome = _worst(failed(tmp_path, r0=4, r1=-signal.SIGKILL, r2=4), 1)
    assert (outcome.kind, outcome.exit_code) == ("failed", 4)
    assert outcome.message.startswith("rank 1 was killed by SIGKILL (the kernel does that when memory runs out) after 1 restart;")
    assert "rank 0 exited with code 9 after 3 restarts" in _worst(failed(tmp_path, r0=9), 3).message
    assert _worst(failed(tmp_path, r0=NOT_SAVED, r1=4), 3).exit_code == NOT_SAVED
