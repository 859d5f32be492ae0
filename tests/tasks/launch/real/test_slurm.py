"""A real Slurm with three nodes on one machine: serving, training past a time limit, an array, cancelling, nodes drained and lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
for folder in (HERE, HERE.parents[2], HERE.parents[2] / "tasks" / "train"):
    sys.path.insert(0, str(folder))

import apptainer_stand_in  # noqa: E402
import slurm_cluster  # noqa: E402

pytestmark = [
    pytest.mark.multi,
    pytest.mark.long,
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing() or "-"),
]
NAMES = ["n1", "n2", "n3"]
MINUTES = 1800.0
"""A requeued job waits two minutes before it starts again."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Generator[slurm_cluster.Slurm]:
    made = slurm_cluster.Slurm(tmp_path_factory.mktemp("slurm"), NAMES)
    yield made
    made.close()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    import tiny_run

    return tiny_run.make(tmp_path_factory.mktemp("train"))


@pytest.fixture
def place(slurm: slurm_cluster.Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLURM_CONF", str(slurm.conf))
    monkeypatch.setenv("WINDLASS_JOBS", str(tmp_path / "my jobs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def windlass(*words: str | Path, codes: tuple[int, ...] = (0,)) -> str:
    done = subprocess.run([sys.executable, "-P", "-m", "windlass", *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode in codes, done.stderr + done.stdout
    return done.stdout


def status(name: str) -> dict[str, Any]:
    return json.loads(windlass("launch", "status", name, "--json", codes=(0, 1, 2)))


def losses(folder: Path) -> dict[int, float]:
    if not (folder / "log.jsonl").exists():
        return {}
    text = (folder / "log.jsonl").read_text()
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return {line["step"]: line["loss"] for line in lines if "tokens_per_second" in line}


def words(recipe: Path, out: Path, steps: int) -> list[str | Path]:
    settings = (
        f"schedule.steps={steps}",
        "batch.micro_batch=4",
        "checkpoint.interval_steps=100000",
        "validation.interval_steps=100000",
    )
    return ["train", "run", recipe, "--out", out, *(word for one in settings for word in ("--set", one))]


def processes(slurm: slurm_cluster.Slurm) -> list[str]:
    found: list[str] = []
    for name in NAMES:
        for pid in subprocess.run(
            ["ip", "netns", "pids", slurm.hosts.namespace(name)], capture_output=True, text=True, check=False
        ).stdout.split():
            file = Path(f"/proc/{pid}/cmdline")
            found.append(file.read_bytes().replace(b"\0", b" ").decode() if file.exists() else "")
    return [line for line in found if "windlass" in line and "slurmd" not in line]


def test_a_server_over_two_nodes_is_one_address(slurm: slurm_cluster.Slurm, place: Path) -> None:
    windlass("launch", "slurm", "--nodes", "2", "--time", "30m", "--name", "srv", "--", "serve", "tiny-glm", "--pp", "2")
    slurm.until(lambda: bool(status("srv")["address"]), "the server has an address", MINUTES)
    found = status("srv")
    key = Path(found["api_key_file"]).read_text().strip()
    assert Path(found["api_key_file"]).stat().st_mode & 0o077 == 0
    body = json.dumps({"model": "tiny-glm", "max_tokens": 8, "messages": [{"role": "user", "content": "Sort 9, 4, 7."}]}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    asked = urllib.request.Request(f"{found['address']}/v1/chat/completions", body, headers)
    with urllib.request.urlopen(asked, timeout=300) as answer:
        assert json.loads(answer.read())["usage"]["completion_tokens"] > 0
    windlass("launch", "cancel", "srv")
    slurm.until(lambda: not processes(slurm), "scancel leaves nothing")
    slurm.until(lambda: status("srv")["state"] == "cancelled", "it is cancelled")
    assert status("srv")["address"] == ""


def test_the_time_limit_passes_in_the_middle_of_training(slurm: slurm_cluster.Slurm, place: Path, recipe: Path) -> None:
    """Requeued with a checkpoint, and the same losses to the last bit as undisturbed; a node is drained meanwhile, so it goes on elsewhere."""
    launch = ["launch", "slurm", "--nodes", "2", "--warning", "60s", "--time", "40m", "--env", "OMP_NUM_THREADS=1", "--name"]
    windlass(*launch, "cut", "--", *words(recipe, place / "cut", 900))
    slurm.until(lambda: len(losses(place / "cut")) > 20, "it trains", MINUTES)
    slurm.output("scontrol", "update", "nodename=n1", "state=drain", "reason=test")
    job = status("cut")["id"]
    slurm.output("scontrol", "update", f"jobid={job}", "TimeLimit=1")  # the limit is here: Slurm warns, then ends it
    slurm.until(lambda: status("cut")["state"] == "waiting", "it goes back to the queue", MINUTES)
    slurm.output("scontrol", "update", f"jobid={job}", "TimeLimit=40")
    slurm.until(lambda: status("cut")["state"] not in ("running", "waiting"), "it ends", MINUTES)
    slurm.output("scontrol", "update", "nodename=n1", "state=resume")
    log = windlass("launch", "logs", "cut")
    assert status("cut")["state"] == "done", log
    assert "goes back to the queue" in log and "attempt 2 on n[2-3]" in log
    windlass(*launch, "whole", "--wait", "--", *words(recipe, place / "whole", 900))
    assert len(losses(place / "whole")) == 900 and losses(place / "cut") == losses(place / "whole")


def test_an_array_of_evaluations(slurm: slurm_cluster.Slurm, place: Path) -> None:
    windlass(
        "launch", "slurm", "--time", "20m", "--name", "arr", "--wait", "--each", "arithmetic,lists", "--",
        "eval", "tiny-glm", "--tasks", "{}", "--num-examples", "2", "--results-dir", f"{place}/results {{}}",
    )  # fmt: skip
    assert {path.name for path in place.glob("results *")} == {"results arithmetic", "results lists"}


def test_a_lost_node_shrinks_the_run(slurm: slurm_cluster.Slurm, place: Path, recipe: Path) -> None:
    launch = (
        "launch slurm --nodes 3 --on-node-loss shrink --min-nodes 1 --time 40m --name shrink --env OMP_NUM_THREADS=1 --".split()
    )
    changes = ("checkpoint.interval_steps=20", "batch.micro_batch=1", "batch.global_batch=6")
    windlass(*launch, *words(recipe, place / "out", 120), *(word for one in changes for word in ("--set", one)))
    slurm.until(lambda: len(losses(place / "out")) > 30, "it trains", MINUTES)
    slurm.kill_node("n3")
    slurm.until(lambda: status("shrink")["state"] not in ("running", "waiting"), "it ends", MINUTES)
    slurm.start_node("n3")
    assert len(losses(place / "out")) == 120, windlass("launch", "logs", "shrink")


def test_a_run_inside_a_container(
    slurm: slurm_cluster.Slurm,
    place: Path,
    recipe: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a stand-in for apptainer, which shows nothing but the image and what the script binds: the job's folder, where we are, --mount."""
    programs = tmp_path_factory.mktemp("programs")
    image = apptainer_stand_in.make_image(programs)
    (programs / "apptainer").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{apptainer_stand_in.__file__}" "$@"\n')
    (programs / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    launch = ["launch", "slurm", "--nodes", "2", "--time", "30m", "--env", "OMP_NUM_THREADS=1", "--wait", "--name"]
    inside = ["--container", image, "--container-runtime", "apptainer", "--python", sys.executable]
    seen = ["--mount", recipe.parents[1]]
    small = ("--set", "schedule.warmup_steps=2", "--set", "validation.samples=4")
    windlass(*launch, "inside", *inside, *seen, "--", *words(recipe, place / "inside", 6), *small)
    windlass(*launch, "outside", "--", *words(recipe, place / "outside", 6), *small)
    assert len(losses(place / "inside")) == 6 and losses(place / "inside") == losses(place / "outside")
    windlass(*launch, "unseen", *inside, "--", *words(recipe, place / "unseen", 6), *small, codes=(2, 4))
    assert losses(place / "unseen") == {}, "without --mount the recipe is not seen"


def test_a_job_that_never_starts_says_why(slurm: slurm_cluster.Slurm, place: Path) -> None:
    slurm.until(lambda: set(slurm.output("sinfo", "-h", "-o", "%t").split()) == {"idle"}, "the lost node is back")
    windlass("launch", "slurm", "--partition", "short", "--time", "50m", "--name", "never", "--", "bench", "tiny-glm")
    slurm.until(lambda: "smaller --time" in status("never")["reason"], "the scheduler has looked at it")
    assert status("never")["state"] == "waiting"
    windlass("launch", "cancel", "never")
    refused = subprocess.run(
        [sys.executable, "-P", "-m", "windlass", "launch", "slurm", "--nodes", "99", "--", "serve", "tiny-glm"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert refused.returncode == 2 and "sbatch failed" in refused.stderr


def test_a_scheduler_that_does_not_answer_loses_nothing(
    slurm: slurm_cluster.Slurm, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windlass("launch", "slurm", "--time", "20m", "--name", "done", "--wait", "--", "eval", "tasks")
    nowhere = place / "slurm.conf"
    nowhere.write_text(slurm.conf.read_text().replace("SlurmctldPort=16817", "SlurmctldPort=16999"))
    monkeypatch.setenv("SLURM_CONF", str(nowhere))
    assert status("done")["state"] == "done", "its own exit file says so"
    assert os.environ["SLURM_CONF"] == str(nowhere)
