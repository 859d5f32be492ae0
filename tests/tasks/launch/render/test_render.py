"""Rendered scripts: against golden files (WINDLASS_GOLDEN=write rewrites them), accepted by shellcheck, for names of every kind."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.errors import BadInput, UnknownName
from windlass.tasks.launch.job import Job, Rendered, Settings, as_name, kind_of
from windlass.tasks.launch.node import read_description
from windlass.tasks.launch.render.choose import render_job
from windlass.tasks.launch.render.slurm import directive, directives, time_limit

pytestmark = pytest.mark.pure

GOLDEN = Path(__file__).parent / "golden"
PLAIN = {"folder": "/shared/jobs/one", "workdir": "/home/ada/runs", "python": "/opt/windlass/bin/python"}
TRAIN = Job(
    name="train-glm",
    command=("train", "run", "glm.toml"),
    kind="train",
    num_nodes=4,
    min_nodes=4,
    gpus_per_node=8,
    ranks_per_node=8,
)
SERVE = Job(
    name="serve-glm", command=("serve", "/models/GLM", "--tp", "16"), kind="serve", num_nodes=2, min_nodes=2, gpus_per_node=8
)
ARRAY = Job(
    name="eval",
    command=("eval", "/models/GLM", "--tasks", "{}"),
    kind="array",
    gpus_per_node=1,
    values=("gsm8k", "humaneval", "mmlu"),
)
SINGLE = Job(name="bench", command=("bench", "tiny-glm"))
ODD = {"folder": '/shared/it\'s a "job" $HOME', "workdir": "/home/ada/my runs", "python": "/opt/my env/bin/python"}

CASES: dict[str, tuple[Job, Settings]] = {
    "slurm-train": (
        TRAIN,
        Settings(scheduler="slurm", time_seconds=86400, partition="gpu", account="lab", exclusive=True, **PLAIN),
    ),
    "slurm-train-shrink": (
        msgspec.structs.replace(TRAIN, min_nodes=2),
        Settings(
            scheduler="slurm", time_seconds=3600, gpu_option="gres", gpu_type="h100", cpus_per_node=64, memory="900G", **PLAIN
        ),
    ),
    "slurm-train-ranks": (TRAIN, Settings(scheduler="slurm", time_seconds=7200, tasks="rank", cpus_per_node=64, **PLAIN)),
    "slurm-serve": (SERVE, Settings(scheduler="slurm", time_seconds=28800, env=(("HF_HOME", "/data/hf"),), **PLAIN)),
    "slurm-array": (ARRAY, Settings(scheduler="slurm", time_seconds=7200, array_limit=2, **PLAIN)),
    "slurm-pyxis": (TRAIN, Settings(scheduler="slurm", container="nvcr.io#nvidia/pytorch:26.01-py3", mounts=("/data",), **PLAIN)),
    "slurm-apptainer": (
        TRAIN,
        Settings(
            scheduler="slurm", container="/images/wind lass.sif", container_runtime="apptainer", mounts=("/data:/mnt",), **PLAIN
        ),
    ),
    "slurm-odd-names": (
        Job(name="odd", command=("train", "run", 'my recipe\'s "best" $x.toml'), kind="train"),
        Settings(scheduler="slurm", time_seconds=3600, extra=("--comment=two words",), env=(("NOTE", "it's $5"),), **ODD),
    ),
    "pbs-train": (
        TRAIN,
        Settings(scheduler="pbs", time_seconds=43200, partition="workq", cpus_per_node=64, exclusive=True, **PLAIN),
    ),
    "pbs-torque": (
        TRAIN,
        Settings(scheduler="pbs", dialect="torque", time_seconds=43200, cpus_per_node=16, memory="64gb", **PLAIN),
    ),
    "pbs-array": (ARRAY, Settings(scheduler="pbs", time_seconds=7200, array_limit=2, **PLAIN)),
    "pbs-array-of-one": (msgspec.structs.replace(ARRAY, values=("gsm8k",)), Settings(scheduler="pbs", **PLAIN)),
    "pbs-torque-array": (ARRAY, Settings(scheduler="pbs", dialect="torque", array_limit=2, **PLAIN)),
    "pbs-apptainer": (TRAIN, Settings(scheduler="pbs", container="/images/wind lass.sif", mounts=("/data:/mnt",), **PLAIN)),
    "ssh-train": (
        msgspec.structs.replace(TRAIN, num_nodes=2, min_nodes=2),
        Settings(scheduler="ssh", hosts=("node001 slots=8", "ada@node002 slots=8 ssh_port=2222"), **PLAIN),
    ),
    "ssh-serve": (SERVE, Settings(scheduler="ssh", hosts=("node001",), **PLAIN)),
    "local-train": (
        msgspec.structs.replace(TRAIN, num_nodes=1, min_nodes=1),
        Settings(scheduler="local", time_seconds=3600, **PLAIN),
    ),
    "local-odd-names": (SINGLE, Settings(scheduler="local", **ODD)),
}


def shown(rendered: Rendered) -> str:
    """Without job.json, which is a value and not a script."""
    files = [f"==> {name} <==\n{text}" for name, text in rendered.files.items() if name != "job.json"]
    return "\n".join([*files, f"submit: {' '.join(rendered.submit)}\n"])


@pytest.mark.parametrize("name", CASES)
def test_scripts_are_as_they_were_read_and_approved(name: str) -> None:
    file = GOLDEN / f"{name}.txt"
    text = shown(render_job(*CASES[name]))
    if os.environ.get("WINDLASS_GOLDEN") == "write":
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_accepts_every_script(tmp_path: Path) -> None:
    scripts: list[Path] = []
    for name, case in CASES.items():
        for file, text in render_job(*case).files.items():
            if file.endswith(".sh"):
                scripts.append(tmp_path / f"{name}-{file}")
                scripts[-1].write_text(text if text.startswith("#!") else f"#!/bin/bash\n{text}")
    done = subprocess.run(["shellcheck", *map(str, scripts)], capture_output=True, text=True, check=False)
    assert done.stdout == ""


@pytest.mark.parametrize("name", CASES)
def test_the_description_comes_back(name: str) -> None:
    job, settings = CASES[name]
    found = read_description(render_job(job, settings).files["job.json"].encode())
    assert (found.job, found.settings) == (job, settings)


NAMES = st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1, max_size=30)


@given(NAMES, NAMES)
def test_any_name_survives_the_shell(folder: str, word: str) -> None:
    """What node.sh would start is what was given, whatever is in the names."""
    settings = Settings(scheduler="local", folder=f"/nowhere/{folder}", workdir="/", python="/bin/echo")
    text = render_job(Job(name="x", command=("bench", word)), settings).files["node.sh"]
    script = text.replace('. "$folder/env.sh"', ":")
    done = subprocess.run(["bash", "-c", script, "node.sh", f"/run {word}"], capture_output=True, text=True, check=True)
    assert done.stdout == f"-P -m windlass launch node /nowhere/{folder} --run /run {word} --node 0\n"


@pytest.mark.parametrize(("seconds", "text"), [(60, "00:01:00"), (61, "00:02:00"), (86400, "1-00:00:00"), (90000, "1-01:00:00")])
def test_slurm_times(seconds: int, text: str) -> None:
    assert time_limit(seconds) == text


def test_a_directive_with_spaces_is_quoted() -> None:
    assert directive("--chdir=/a b") == '#SBATCH "--chdir=/a b"'
    assert directive("--nodes=2") == "#SBATCH --nodes=2"


def test_only_what_was_asked_is_written() -> None:
    """Sites refuse options that they do not know; gres and gpus-per-node together are fatal."""
    plain = directives(SINGLE, Settings(scheduler="slurm", **PLAIN))
    assert not [
        line
        for line in plain
        if line.startswith(("--mem", "--gres", "--gpus", "--partition", "--time", "--exclusive", "--signal"))
    ]
    gres = directives(TRAIN, Settings(scheduler="slurm", gpu_option="gres", **PLAIN))
    assert "--gres=gpu:8" in gres and not [line for line in gres if line.startswith("--gpus")]


def test_no_constant_meets() -> None:
    """Address and port come from the scheduler and from what is free."""
    for case in CASES.values():
        for text in render_job(*case).files.values():
            assert "MASTER_PORT" not in text and "29500" not in text and "127.0.0.1" not in text


@pytest.mark.parametrize(
    ("command", "nodes", "values", "kind"),
    [
        (("train", "run", "r.toml"), 4, False, "train"),
        (("serve", "M"), 2, False, "serve"),
        (("bench", "M"), 1, False, "single"),
        (("eval", "M", "--tasks", "{}"), 1, True, "array"),
    ],
)
def test_kinds(command: tuple[str, ...], nodes: int, values: bool, kind: str) -> None:
    assert kind_of(command, nodes, values) == kind


@pytest.mark.parametrize(
    ("command", "nodes", "values"),
    [((), 1, False), (("bench", "M"), 2, False), (("eval", "M"), 1, True), (("eval", "{}"), 1, False), (("eval", "{}"), 2, True)],
)
def test_what_cannot_be_launched_is_refused(command: tuple[str, ...], nodes: int, values: bool) -> None:
    with pytest.raises(BadInput):
        kind_of(command, nodes, values)


def test_an_unknown_command_is_named() -> None:
    with pytest.raises(UnknownName, match="serve"):
        kind_of(("serv", "M"), 1, False)


def test_a_warning_later_than_the_limit_is_refused() -> None:
    with pytest.raises(BadInput, match="--warning"):
        render_job(TRAIN, Settings(scheduler="slurm", time_seconds=100, **PLAIN))


def test_a_line_break_is_refused() -> None:
    with pytest.raises(BadInput, match="line break"):
        render_job(Job(name="x", command=("bench", "a\nb")), Settings(scheduler="local", **PLAIN))


@given(st.text(max_size=100))
def test_job_names_are_names(text: str) -> None:
    assert as_name(text) and all(letter.isascii() and (letter.isalnum() or letter in "_.+-") for letter in as_name(text))


def test_a_thousand_nodes_are_rendered() -> None:
    job = msgspec.structs.replace(TRAIN, num_nodes=1024, min_nodes=1024)
    hosts = tuple(f"node{number:04} slots=8" for number in range(1024))
    slurm = render_job(job, Settings(scheduler="slurm", time_seconds=86400, **PLAIN)).files["job.sh"]
    assert "--nodes=1024" in slurm and len(slurm) < 4000
    ssh = render_job(job, Settings(scheduler="ssh", hosts=hosts, **PLAIN))
    assert ssh.files["commands.txt"].count("\n") >= 1024
