"""PBS scripts run by a stand-in for its commands: two nodes, a walltime that is near, a job that submits itself again, an array."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (HERE, HERE.parents[2], HERE.parents[2] / "tasks" / "train"):
    sys.path.insert(0, str(folder))

import pbs_stand_in  # noqa: E402

pytestmark = [pytest.mark.multi, pytest.mark.long]
MINUTES = 1800.0


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    programs = pbs_stand_in.install(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("STANDIN_ROOT", str(tmp_path / "server"))
    monkeypatch.setenv("STANDIN_NODES", f"localhost,{os.uname().nodename}")
    monkeypatch.setenv("WINDLASS_JOBS", str(tmp_path / "jobs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def windlass(*words: str | Path, codes: tuple[int, ...] = (0,)) -> str:
    done = subprocess.run([sys.executable, "-P", "-m", "windlass", *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode in codes, done.stderr + done.stdout
    return done.stdout


def state(name: str) -> str:
    return json.loads(windlass("launch", "status", name, "--json", codes=(0, 1, 2)))["state"]


def patient(found: Callable[[], bool]) -> None:
    """A run of minutes on a busy machine."""
    end = time.monotonic() + MINUTES
    while not found():
        assert time.monotonic() < end, "hung"
        time.sleep(0.2)


def losses(folder: Path) -> dict[int, float]:
    if not (folder / "log.jsonl").exists():
        return {}
    text = (folder / "log.jsonl").read_text()
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return {line["step"]: line["loss"] for line in lines if "tokens_per_second" in line}


def test_the_walltime_is_near_and_the_job_goes_on_as_another(place: Path) -> None:
    pytest.importorskip("torch")
    import tiny_run

    recipe = tiny_run.make(place)
    common = ["--set", "schedule.steps=300", "--set", "batch.micro_batch=4", "--set", "checkpoint.interval_steps=1000"]
    common += ["--set", "validation.interval_steps=1000"]
    launch = ["launch", "pbs", "--nodes", "2", "--warning", "60s", "--time", "30m", "--name"]
    windlass(*launch, "cut", "--", "train", "run", recipe, "--out", place / "cut", *common)
    patient(lambda: len(losses(place / "cut")) > 20)
    os.kill(int((place / "server" / "1.standin" / "pid").read_text()), signal.SIGUSR1)  # what the script's own timer does
    patient(lambda: state("cut") not in ("running", "waiting"))
    assert state("cut") == "done"
    assert (place / "server" / "2.standin").exists(), "the job went on under another id"
    windlass(*launch, "whole", "--wait", "--", "train", "run", recipe, "--out", place / "whole", *common)
    assert losses(place / "cut") == losses(place / "whole") and len(losses(place / "whole")) == 300


def test_an_array(place: Path) -> None:
    windlass(
        "launch", "pbs", "--wait", "--name", "arr", "--each", "arithmetic,lists", "--",
        "eval", "tiny-glm", "--tasks", "{}", "--num-examples", "2", "--results-dir", f"{place}/results {{}}",
    )  # fmt: skip
    assert {path.name for path in place.glob("results *")} == {"results arithmetic", "results lists"}


def test_torques_syntax_is_refused_by_pbs_pro(place: Path) -> None:
    """The seed of many scripts: `nodes=2:ppn=8:gpus=8`."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "windlass", "launch", "pbs", "--dialect", "torque", "--", "bench", "tiny-glm"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "node(s) specification error" in done.stderr
