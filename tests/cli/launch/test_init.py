"""`windlass launch init`: what stops one step does not stop the others, and nothing is written where nobody asked."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from windlass.cli import execute
from windlass.cli.launch.init import Init, InitOptions

pytestmark = pytest.mark.pure


def outcome(init: Init, step: str) -> tuple[str, str]:
    return next((one.outcome, one.detail) for one in init.run() if one.step == step)


def yes(question: str) -> bool:
    return True


def test_without_a_local_disk_nothing_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("windlass.cli.launch.init.LOCAL_DISKS", ())
    options = InitOptions(hosts="n1", dry_run=True)
    assert outcome(Init(options, tmp_path / "home", yes), "local disks") == (
        "failed",
        "no local disk is found; name one with --disk",
    )
    assert list(tmp_path.iterdir()) == []


def test_a_scheduler_that_does_not_answer_fails_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(argv: list[str], **options: object) -> None:
        raise subprocess.TimeoutExpired(argv, 30)

    monkeypatch.setattr(subprocess, "run", hangs)
    init = Init(InitOptions(scheduler="slurm", disk=tmp_path, dry_run=True), tmp_path / "home", yes)
    assert outcome(init, "hostfile") == ("failed", "sinfo did not answer within 30 s; run this again")
    assert outcome(init, "job script")[0] == "would"


def test_names_in_whatever_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sinfo").write_text("#!/bin/sh\nprintf 'n1\\ncaf\\351\\n'\n")
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    init = Init(InitOptions(scheduler="slurm", disk=tmp_path, dry_run=True), tmp_path / "home", yes)
    assert outcome(init, "hostfile") == ("would", f"write {init.hostfile} with 2 machines")


def test_settings_that_are_there_stay(tmp_path: Path) -> None:
    (tmp_path / "launch.toml").write_text('partition = "a"\n')
    init = Init(InitOptions(hosts="n1", disk=tmp_path, partition="b", dry_run=True), tmp_path, yes)
    assert outcome(init, "launch settings") == ("there", f"{tmp_path / 'launch.toml'} is left as it is; change it by hand")


def test_an_unknown_scheduler_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["launch", "init", "--scheduler", "lsf", "--dry-run"]) == 2
    assert "unknown --scheduler 'lsf'" in capsys.readouterr().err
