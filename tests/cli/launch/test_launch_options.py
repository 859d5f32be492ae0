"""Options that would do nothing and command lines that a job could not start with are refused; what is refused leaves nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from windlass.cli import execute
from windlass.cli.launch.refuse import TAKEN_BY

pytestmark = pytest.mark.pure

VALUES = {
    "gpu_option": "gres",
    "tasks": "rank",
    "cpus": "4",
    "array_limit": "2",
    "container_runtime": "apptainer",
    "dialect": "torque",
}
FLAGS = {"exclusive": ("--exclusive",), "requeue": ("--no-requeue",)}
VERBS = {
    "serve": ("serve", "tiny-glm", "--context", "2k"),
    "train": ("train", "run", "recipe.toml", "--out", "x", "--set", "batch.micro_batch=1"),
    "eval": ("eval", "tiny-glm", "--tasks", "lists"),
    "bench": ("bench", "tiny-glm", "--batch", "1,8"),
    "convert": ("convert", "tiny-glm", "b", "--quant", "int4"),
    "check": ("check", "tiny-glm", "--full"),
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WINDLASS_JOBS", str(tmp_path / "home" / "jobs"))
    monkeypatch.setenv("WINDLASS_SKIP_CHECK", "1")
    monkeypatch.setenv("PATH", str(tmp_path))  # no scheduler
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text((Path(__file__).parents[3] / "recipes" / "tiny-glm-moe-cpu.toml").read_text())
    (tmp_path / "hosts").write_text("n1 slots=2\nn2 slots=2\n")
    return tmp_path


def scheduler_words(scheduler: str) -> tuple[str, ...]:
    return ("launch", scheduler, *(("--hostfile", "hosts") if scheduler == "ssh" else ()))


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert execute([*words]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1, "one line"
    return printed.err


@pytest.mark.parametrize("scheduler", ["slurm", "pbs", "ssh", "local"])
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_for_every_scheduler(scheduler: str, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute([*scheduler_words(scheduler), "--dry-run", "--json", "--", *VERBS[verb]]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "windlass " + " ".join(VERBS[verb]) in found["files"]["job.sh"]
    description = json.loads(found["files"]["job.json"])
    assert tuple(description["job"]["command"]) == VERBS[verb]
    spans = scheduler == "ssh" and verb in ("serve", "train")
    assert description["job"]["num_nodes"] == (2 if spans else 1)


@pytest.mark.parametrize("name", TAKEN_BY)
@pytest.mark.parametrize("scheduler", ["slurm", "pbs", "ssh", "local"])
def test_options_of_other_schedulers_are_refused(scheduler: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if scheduler in TAKEN_BY[name]:
        return
    option = FLAGS.get(name) or (f"--{name.replace('_', '-')}", VALUES.get(name, "hosts"))
    said = refusal(capsys, *scheduler_words(scheduler), *option, "--dry-run", "--", "bench", "tiny-glm")
    assert option[0].replace("--no-", "--") in said and f"launch {TAKEN_BY[name][0]}" in said


@pytest.mark.parametrize(
    ("words", "command", "says"),
    [
        (("slurm", "--warning", "5min"), "train run recipe.toml", "--warning does nothing without --time"),
        (("slurm", "--array-limit", "2"), "bench tiny-glm", "without --each"),
        (("slurm", "--mount", "/data"), "bench tiny-glm", "without --container"),
        (("slurm", "--each", "lists,functions", "--array-limit", "0"), "eval tiny-glm --tasks {}", "at least 1"),
        (("slurm", "--ranks", "2"), "bench tiny-glm", "--ranks is for `train run`"),
        (("slurm", "--on-node-loss", "shrink"), "serve tiny-glm", "--on-node-loss is for `train run`"),
        (("slurm", "--nodes", "2", "--min-nodes", "1"), "train run recipe.toml", "--on-node-loss shrink"),
        (("pbs", "--nodes", "2", "--on-node-loss", "shrink"), "train run recipe.toml", "for Slurm and ssh"),
        (("pbs", "--container", "i.sif", "--container-runtime", "pyxis"), "bench tiny-glm", "apptainer"),
        (("pbs", "--dialect", "torque", "--exclusive"), "bench tiny-glm", "--extra"),
        (("local",), "train run none.toml", "none.toml is not here"),
        (("slurm",), "eval tiny-glm --taks lists", "--taks"),
        (("slurm",), "eval tiny-glm --num-examples many", "see `windlass eval --help`"),
        (("slurm",), "convert", "Missing argument"),
        (("slurm",), "train runn recipe.toml", "runn"),
        (("slurm",), "bench --help", "help is not a job"),
        (("slurm",), "run tiny-glm", "unknown command to launch 'run'"),
    ],
)
def test_what_would_fail_later_is_refused_now(
    words: tuple[str, ...], command: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refusal(capsys, "launch", *words, "--dry-run", "--", *command.split())


def test_the_values_of_an_array_are_parsed_as_they_will_be(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("launch", "slurm", "--each", "5,50", "--dry-run", "--", "eval", "tiny-glm", "--num-examples", "{}")
    assert execute([*words]) == 0
    assert "--array=0-1" in capsys.readouterr().out


def test_a_job_that_is_refused_leaves_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "sbatch is not installed" in refusal(capsys, "launch", "slurm", "--", "bench", "tiny-glm")
    assert not (place / "home" / "jobs" / "bench-tiny-glm").exists()
    kept = place / "kept"
    kept.mkdir()
    (kept / "mine").touch()
    refusal(capsys, "launch", "slurm", "--folder", str(kept), "--", "bench", "tiny-glm")
    assert (kept / "mine").exists()


def test_the_container_of_a_site_is_not_for_this_machine(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "site.toml").write_text(
        'container = "image.sif"\ncontainer_runtime = "apptainer"\nmounts = ["/data"]\ntime = "1h"\n'
    )
    for scheduler, has_container in (("slurm", True), ("pbs", True), ("ssh", False), ("local", False)):
        words = (*scheduler_words(scheduler), "--site", "site.toml", "--dry-run", "--json", "--", "bench", "tiny-glm")
        assert execute([*words]) == 0
        settings = json.loads(json.loads(capsys.readouterr().out)["files"]["job.json"])["settings"]
        assert (settings["container"] == "image.sif") is has_container and (settings["python"] == "python3") is has_container
        assert settings["time_seconds"] == 3600


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("slurm",), ("--container-image=/img.sqsh", "--container-mounts=", "/data:/data", "--container-env=PYTHONUNBUFFERED,A")),
        (("slurm", "--container-runtime", "apptainer"), ("apptainer exec --nv --bind", "--bind /data:/data /img.sqsh bash")),
        (("pbs",), ("apptainer exec --nv --bind", "--bind /data /img.sqsh bash")),
    ],
)
def test_containers(words: tuple[str, ...], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--gpus", "2", "--container", "/img.sqsh", "--mount", "/data", "--env", "A=1", "--dry-run", "--json")
    assert execute(["launch", *words, *given, "--", "bench", "tiny-glm"]) == 0
    script = json.loads(capsys.readouterr().out)["files"]
    assert all(part in script["job.sh"] for part in parts), script["job.sh"]
    assert "exec python3 -P -m windlass" in script["node.sh"], "the image's"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--", "eval", "nomodel"], "unknown model 'nomodel'"),
        (["--", "serve", "nomodel"], "unknown model 'nomodel'"),
        (["--", "eval", "tiny-glm", "--tasks", "nosuchtask"], "unknown task 'nosuchtask'"),
        (["--each", "lists,nosuchtask", "--", "eval", "tiny-glm", "--tasks", "{}"], "unknown task 'nosuchtask'"),
    ],
)
def test_what_the_command_would_refuse_is_refused_before(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WINDLASS_JOBS", str(tmp_path / "jobs"))
    assert execute(["launch", "local", *words]) == 2
    assert says in capsys.readouterr().err and not (tmp_path / "jobs").exists()
    assert execute(["launch", "local", "--no-check", "--dry-run", *words]) == 0, "as its user wants it"


def test_a_batch_that_does_not_divide_is_refused_before(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WINDLASS_JOBS", str(tmp_path / "jobs"))
    recipe = Path(__file__).parents[3] / "recipes" / "tiny-glm-moe-cpu.toml"
    sizes = ["--set", "batch.micro_batch=3", "--set", "batch.global_batch=7"]
    assert execute(["launch", "slurm", "--nodes", "2", "--", "train", "run", str(recipe), *sizes]) == 2
    assert "global batch 7 is not divisible by dp 2" in capsys.readouterr().err and not (tmp_path / "jobs").exists()


@pytest.mark.parametrize(
    ("words", "settings", "says"),
    [
        (
            ("--nodes", "2"),
            ("parallel.tp=3",),
            "tp 3 x pp 1 needs a multiple of 3 processes, and there are 2: start 3 with --ranks 3",
        ),
        (("--gpus", "2"), ("parallel.zero=1",), "parallel.zero 1: FSDP is ZeRO 3"),
        (
            ("--gpus", "3"),
            ("hardware.on=8xH100-80GB", "batch.global_batch=8", "batch.micro_batch=1"),
            "global batch 8 is not divisible",
        ),
        (("--container", "i.sqsh"), ("parallel.cp=2",), "context parallelism can be planned but not trained"),
    ],
)
def test_layouts_that_no_trainer_has_are_refused_before(
    words: tuple[str, ...], settings: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """For as many processes as the job has, whatever hardware the recipe is for."""
    given = [word for setting in settings for word in ("--set", setting)]
    assert says in refusal(capsys, "launch", "slurm", *words, "--dry-run", "--", "train", "run", "recipe.toml", *given)


ELSEWHERE = """
model.path = "/images/model"
model.start = "weights"
data = { sequence_length = 128, sources = [{ path = "/data" }] }
batch = { global_batch = 4, micro_batch = 4 }
schedule.steps = 3
"""


def test_what_only_the_nodes_have_is_not_looked_for_here(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "recipe.toml").write_text(ELSEWHERE)
    train = ("--dry-run", "--", "train", "run", "recipe.toml")
    for words in (("slurm", "--container", "i.sqsh"), ("ssh", "--hostfile", "hosts")):
        assert execute(["launch", *words, *train]) == 0
    assert "/images/model" in refusal(capsys, "launch", "slurm", *train)


def test_that_this_machine_has_no_gpu_refuses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Slurm gives GPUs by its partitions too."""
    words = ["--dry-run", "--", "train", "run", "recipe.toml", "--set", "memory.offload=cpu"]
    assert execute(["launch", "slurm", *words]) == 0
    on_cpus = [*words, "--set", "hardware.on=cpu:8,ram=64GB"]
    assert "has no effect on CPUs" in refusal(capsys, "launch", "slurm", *on_cpus)
