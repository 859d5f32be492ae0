"""`windlass train`: a tiny model from its recipe to its export, interrupted and resumed; and bad recipes in one line each."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from waiting import HUNG_SECONDS
from windlass.cli import execute as windlass
from windlass.cli.plan.training import with_trainer_defaults
from windlass.core.recipe.recipe import recipe_from
from windlass.errors import NOT_SAVED, STOPPED
from windlass.runtime.weights.source import open_model
from windlass.tasks.train.logging.fan_out import StepMetrics
from windlass.tasks.train.logging.jsonl import JsonLines, read_lines, read_samples

if TYPE_CHECKING:
    from torch import Tensor

pytestmark = pytest.mark.cpu

SMALL = {
    "schedule.steps": 12, "schedule.warmup_steps": 2, "batch.global_batch": 4, "batch.micro_batch": 4, "checkpoint.interval_steps": 5,
    "validation.interval_steps": 6, "validation.samples": 4,
}  # fmt: skip


def _load(path: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


tiny_run = _load(Path(__file__).parents[2] / "tasks" / "train" / "tiny_run.py")


@pytest.fixture(scope="module", autouse=True)
def _torch() -> None:
    """Looked for when the first of these tests runs: collecting them takes no torch."""
    pytest.importorskip("torch")
    pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.make(tmp_path_factory.mktemp("train"))


def words(recipe: Path, out: Path, *more: str, **changes: Any) -> list[str]:
    settings = SMALL | {key.replace("__", "."): value for key, value in changes.items()}
    given = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return ["train", "run", str(recipe), "--out", str(out), *given, *more]


def last(out: Path) -> tuple[str, dict[str, Tensor]]:
    from windlass.tasks.train.checkpoint.tensors import CheckpointTensors

    step = sorted((out / "checkpoints").glob("step-*"))[-1]
    tensors = CheckpointTensors(step)
    return step.name, {name: tensors.tensor(name).clone() for name in tensors.names()}


def losses(out: Path) -> dict[int, tuple[float, float]]:
    return {sample["step"]: (sample["loss"], sample["grad_norm"]) for sample in read_samples(out / "log.jsonl")[0]}


def assert_same(one: Path, other: Path) -> None:
    (step, left), (other_step, right) = last(one), last(other)
    assert step == other_step and left.keys() == right.keys()
    assert all(value.equal(right[name]) for name, value in left.items())
    assert losses(one) == losses(other)


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve steps that nobody disturbed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert windlass(words(recipe, out)) == 0
    return out


# --- a run ------------------------------------------------------------------------------------------------------------


def test_what_a_run_leaves(whole: Path) -> None:
    assert sorted(path.name for path in (whole / "checkpoints").glob("step-*")) == ["step-00000010", "step-00000012"]
    samples, events = read_samples(whole / "log.jsonl")
    assert [sample["step"] for sample in samples] == list(range(1, 13))
    assert samples[-1]["tokens"] == 12 * 4 * 128 and samples[-1]["expert_balance_cv"] >= 0 and samples[-1]["mfu"] > 0
    assert [event["step"] for event in events if event["event"] == "validation"] == [6, 12]
    assert (whole / "tokenizer" / "tokenizer.json").is_file()
    if importlib.util.find_spec("matplotlib") is not None:
        assert (whole / "run.png").read_bytes().startswith(b"\x89PNG")


def test_a_loss_that_falls(recipe: Path, tmp_path: Path) -> None:
    """The shipped recipe, 60 of its steps, on sentences of 1.7 nats a token: an untrained model says ln 512 = 6.24."""
    assert windlass(["train", "run", str(recipe), "--out", str(tmp_path / "run"), "--set", "schedule.steps=60"]) == 0
    samples, events = read_samples(tmp_path / "run" / "log.jsonl")
    assert samples[0]["loss"] > 6.0
    assert sum(sample["loss"] for sample in samples[-10:]) / 10 < 2.1
    assert [event["loss"] for event in events if event["event"] == "validation"][-1] < 2.2


# --- stopped and resumed ----------------------------------------------------------------------------------------------


@contextmanager
def signalled(number: signal.Signals, after: int) -> Generator[None]:
    """As from outside, when the line of step `after` is written."""
    plain = JsonLines.sample

    def sample(self: JsonLines, sample: StepMetrics) -> None:
        plain(self, sample)
        if sample.step == after:
            os.kill(os.getpid(), number)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(JsonLines, "sample", sample)
        yield


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_stops_and_a_resume_is_bit_identical(
    recipe: Path, whole: Path, tmp_path: Path, number: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with signalled(number, after=3):
        assert windlass(words(recipe, out)) == STOPPED
    stopped = last(out)[0]
    assert (
        f"stopped after step {int(stopped.removeprefix('step-'))} ({number.name}); continue with --resume"
        in capsys.readouterr().err
    )
    assert "step-00000003" <= stopped < "step-00000012"
    assert windlass(words(recipe, out, "--resume")) == 0
    assert_same(out, whole)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_disk_that_is_full_at_the_end(
    recipe: Path, tmp_path: Path, is_stopped: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps are gone: neither done nor a stop that a scheduler may repeat. With a second folder it is both, and a resume finds it."""
    from windlass.tasks.train.checkpoint.storage import CheckedWriter

    out, second, real = tmp_path / "run", tmp_path / "second", CheckedWriter.write_data

    def write(self: CheckedWriter, *given: Any) -> Any:
        if self.folder.is_relative_to(out) and not self.folder.name.startswith(("step-00000000", "step-00000005")):
            raise OSError(28, "No space left on device")
        return real(self, *given)

    changes = {"validation__interval_steps": 100}
    with monkeypatch.context() as patched, signalled(signal.SIGTERM, after=8 if is_stopped else 1000):
        patched.setattr(CheckedWriter, "write_data", write)
        assert windlass(words(recipe, out, "--json", **changes)) == NOT_SAVED
        said, good = capsys.readouterr().err.splitlines()[-1], out / "checkpoints" / "step-00000005"
        assert f"steps 6 to {8 if is_stopped else 12} are lost; the last good checkpoint is {good}" in said
        assert said.startswith(
            "windlass: stopped after step 8 (SIGTERM)" if is_stopped else "windlass: training ended after step 12"
        )
        shutil.rmtree(out)
        with_second = {**changes, "checkpoint__fallback": second}
        assert windlass(words(recipe, out, **with_second)) == (STOPPED if is_stopped else 0)
    assert sorted(path.name for path in second.glob("step-*"))[-1] == ("step-00000008" if is_stopped else "step-00000012")
    assert windlass(words(recipe, out, **with_second)) == 2
    assert f"{second} already has checkpoints" in capsys.readouterr().err
    assert windlass(words(recipe, out, "--resume", **with_second)) == 0
    assert losses(out).keys() == set(range(1, 13))


def test_what_lasts_is_said(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever it is that takes long before the first line of a step, and in the last save; with --json nothing."""
    from windlass.cli.train import phases

    monkeypatch.setattr(
        phases, "Timer", lambda seconds, say, given: SimpleNamespace(start=lambda: say(*given), cancel=lambda: None)
    )
    out = tmp_path / "run"
    assert windlass(words(recipe, out)) == 0
    lines = capsys.readouterr().err.splitlines()
    said = [line.removesuffix(" ...") for line in lines if line.endswith(" ...") or line.startswith("step 1/")]
    before = said[: next(place for place, line in enumerate(said) if line.startswith("step 1/"))]
    building = [phases.LOADING, phases.BUILDING, phases.RESUMING]
    assert before == [*building, "saving a checkpoint", "the first step"] and said[-1] == "saving a checkpoint"
    assert windlass(words(recipe, out, "--json", "--resume", schedule__steps=13)) == 0
    assert capsys.readouterr().err == ""


def test_what_the_first_step_waits_for() -> None:
    from windlass.cli.train.phases import first_step

    plain = {"model": {"name": "x"}}
    assert "compiling kernels" in first_step(recipe_from(plain), on_gpu=True)
    assert "compiling kernels" in first_step(recipe_from({**plain, "run": {"compile": True}}), on_gpu=False)
    assert "DeepSpeed compiles" in first_step(recipe_from({**plain, "run": {"engine": "deepspeed"}}), on_gpu=False)
    assert first_step(recipe_from(plain), on_gpu=False) == "the first step"


def test_a_signal_before_the_first_step(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from windlass.cli.train import components

    monkeypatch.setattr(components, "open_trainer", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert windlass(words(recipe, tmp_path / "run", "--json")) == STOPPED
    assert "stopped before the first step (SIGTERM); nothing is lost, start it again" in one_line(capsys)


def test_a_folder_with_checkpoints_is_not_begun_anew(recipe: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert windlass(words(recipe, whole, "--json")) == 2
    assert "already has checkpoints; continue with --resume" in one_line(capsys)


@contextmanager
def started(command: list[str], said: Path, **environment: str) -> Generator[subprocess.Popen[bytes]]:
    """In a process of its own, which does not outlive the test, nor do its children."""
    with said.open("wb") as stream:
        run = subprocess.Popen(
            command, env=tiny_run.ENVIRONMENT | environment, stderr=stream, stdout=stream, start_new_session=True
        )
    try:
        yield run
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + HUNG_SECONDS
    while not condition():
        assert time.monotonic() < end, f"hung: waited for {what}"
        time.sleep(0.02)


KILLS_ITSELF = """
import os, signal, sys, time
from pathlib import Path

if os.environ.get("RANK") == "1" and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
    from windlass.tasks.train.loop.guard import LossGuard

    plain, calls = LossGuard.judge, []

    def judge(*words):
        calls.append(words)
        if len(calls) == 8:
            while not Path(os.environ["WINDLASS_TEST_WAITS_FOR"]).exists():
                time.sleep(0.01)
            Path(__file__).with_name("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*words)

    LossGuard.judge = judge
"""
"""Read by every Python that is started: the second rank's first life ends in its eighth step, once the fifth is on the disk."""


def last_start(out: Path) -> int:
    """The step of the checkpoint that the last of a run's lives began with: its lines begin again after it."""
    steps = [line["step"] for line in read_lines(out / "log.jsonl") if "event" not in line]
    return [after - 1 for before, after in pairwise([0, *steps]) if after != before + 1][-1]


@pytest.mark.long
def test_a_signal_to_the_agent_stops_all(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [*tiny_run.COMMAND, *words(recipe, out, "--max-restarts", "2", schedule__steps=1000)]
    with started(command, tmp_path / "said") as run:
        until(lambda: len(losses(out)) >= 3 or run.poll() is not None, "three steps")
        run.send_signal(signal.SIGTERM)
        assert run.wait(HUNG_SECONDS) == STOPPED, (tmp_path / "said").read_text()
    assert json.loads((out / "outcome.json").read_text())["kind"] == "stopped"
    assert int(last(out)[0].removeprefix("step-")) == max(losses(out))


@pytest.mark.multi
def test_two_processes_of_which_one_is_killed(recipe: Path, whole: Path, tmp_path: Path) -> None:
    """FSDP over two: the run starts again from its checkpoint by itself, and ends with the losses of one process."""
    out = tmp_path / "run"
    changes = {"parallel__fsdp": 2, "batch__micro_batch": 2, "schedule__steps": 12}
    command = [*tiny_run.COMMAND, *words(recipe, out, "--nproc", "2", **changes)]
    (tmp_path / "sitecustomize.py").write_text(KILLS_ITSELF)
    told = {"WINDLASS_TEST_WAITS_FOR": str(out / "checkpoints" / "step-00000005")}
    with started(command, tmp_path / "said", PYTHONPATH=f"{tmp_path}:{tiny_run.ENVIRONMENT['PYTHONPATH']}", **told) as run:
        assert run.wait(HUNG_SECONDS) == 0, (tmp_path / "said").read_text()
    assert (tmp_path / "killed").exists() and last_start(out) == 5
    manifest = json.loads((sorted((out / "checkpoints").glob("step-*"))[-1] / "manifest.json").read_text())
    assert manifest["world_size"] == 2 and {"__0_0.distcp", "__1_0.distcp"} <= manifest["files"].keys()
    ours, alone = losses(out), losses(whole)
    assert ours.keys() == alone.keys()
    assert all(abs(ours[step][0] - alone[step][0]) < 1e-4 for step in ours)


# --- what comes out ---------------------------------------------------------------------------------------------------


def logits_of(model: Path, tokens: Tensor) -> Tensor:
    """All of one sequence, by our own decoder in fp32."""
    import torch

    from windlass.runtime.nn import Decoder
    from windlass.runtime.weights.load.checkpoint import CheckpointWeights
    from windlass.tasks.train.data.batches import PackedBatch
    from windlass.tasks.train.model.packing import packed_step

    opened = open_model(model)
    decoder = Decoder(opened.spec, CheckpointWeights(opened, dtype=torch.float32, keep_quantized=False))
    rows = torch.arange(len(tokens))[None]
    step = packed_step(
        PackedBatch(tokens[None], tokens[None], rows, torch.zeros_like(rows, dtype=torch.int32)), torch.device("cpu")
    )
    with torch.no_grad():
        return decoder.logits(decoder.forward_hidden(step))


def test_export_convert_run(whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """To Hugging Face, with the logits of transformers; to int4; and text out of the engine."""
    import torch

    assert windlass(["train", "export", str(whole), str(tmp_path / "hf"), "--dtype", "fp32", "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert said["step"] == 12 and said["num_tensors"] > 50
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, experts_implementation="eager"
    )
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").eos_token == tiny_run.END
    with torch.no_grad():
        expected = theirs(torch.arange(20)[None]).logits[0]
    assert (logits_of(tmp_path / "hf", torch.arange(20)) - expected).abs().max() < 1e-4
    assert windlass(["convert", str(tmp_path / "hf"), str(tmp_path / "int4"), "--quant", "int4", "--group", "32"]) == 0
    capfd.readouterr()
    assert windlass(["run", str(tmp_path / "int4"), "--prompt", "The", "--max-tokens", "8", "--temperature", "0"]) == 0
    assert "8 tokens" in capfd.readouterr().err


LORA = """
[model]
path = "{base}"
start = "weights"
[data]
sequence_length = 128
sources = [{{ path = "{data}" }}]
[batch]
global_batch = 4
micro_batch = 4
[precision]
compute = "fp32"
[schedule]
steps = 3
[lora]
rank = 4
"""


def test_adapters_on_packed_weights(recipe: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An export, packed to int4, taught adapters, which are given out for PEFT; nothing to adapt is one line."""
    assert windlass(["train", "export", str(whole), str(tmp_path / "hf")]) == 0
    assert windlass(["convert", str(tmp_path / "hf"), str(tmp_path / "int4"), "--quant", "int4", "--group", "32"]) == 0
    other = tmp_path / "lora.toml"
    other.write_text(LORA.format(base=tmp_path / "int4", data=recipe.parent.parent / "out" / "tiny-cpu" / "tasks"))
    assert windlass(["train", "run", str(other)]) == 0
    capsys.readouterr()
    assert windlass(["train", "export", str(tmp_path / "lora-run"), str(tmp_path / "adapter"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_tensors"] == 3 * 4 * 2
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (written["r"], written["target_modules"]) == (4, ["k_proj", "o_proj", "q_proj", "v_proj"])
    assert windlass(words(recipe, tmp_path / "run", "--json", lora__rank=4)) == 2
    assert "needs weights to start from" in one_line(capsys)


def test_what_cannot_be_exported(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert windlass(["train", "export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "has no checkpoint" in one_line(capsys)
    assert windlass(["train", "export", str(tmp_path / "no"), str(tmp_path / "out")]) == 2
    assert "is not a directory" in one_line(capsys)
    shutil.copytree(whole / "checkpoints", tmp_path / "damaged")
    (part,) = (tmp_path / "damaged" / "step-00000012").glob("*.distcp")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    assert windlass(["train", "export", str(part.parent), str(tmp_path / "out")]) == 2
    assert "is damaged: its checksum differs from the manifest" in one_line(capsys)
    assert windlass(["train", "export", str(whole), str(tmp_path / "out"), "--dtype", "fp8"]) == 2
    assert "--dtype must be one of bf16, fp16, fp32, not 'fp8'" in one_line(capsys)


# --- a profile --------------------------------------------------------------------------------------------------------


def test_a_profile(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert windlass(words(recipe, out, "--profile", schedule__steps=8, validation__interval_steps=8)) == 0
    trace = json.loads((out / "profile" / "trace.json").read_text())
    assert len(trace["traceEvents"]) > 100
    flops = json.loads((out / "profile" / "flops.json").read_text())
    assert flops["Global"]["total"] > 0 and any("layers.1" in name for name in flops)
    assert "mm" in (out / "profile" / "operations.txt").read_text()


# --- bad input --------------------------------------------------------------------------------------------------------


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr().err.strip()
    assert said.startswith("windlass: ") and "\n" not in said, said
    return said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule__stepz": 3}, "unknown key in"),
        ({"model__config__hidden_size": -1}, "hidden_size"),
        ({"parallel__pp": 3}, "tp 1 x pp 3 needs a multiple of 3 processes, and there is one: start 3 with --nproc 3"),
        ({"batch__global_batch": 5}, "global batch 5 is not divisible"),
        ({"data__sequence_length": 100_000}, "sequence"),
        ({"data__sources": "[{path='nowhere'}]"}, "has no token shards"),
        ({"model__mtp": "true"}, "model.mtp is set"),
        ({"precision__compute": "fp8"}, "can be planned but not trained"),
        ({"model__start": "weights"}, "needs model.name or model.path"),
        ({"checkpoint__keep": 0}, "checkpoint.keep is 0"),
    ],
)
def test_bad_recipes_are_one_line(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    assert windlass(words(recipe, tmp_path / "run", "--json", **changes)) == 2
    assert message in one_line(capsys)


@pytest.mark.parametrize("words", [["--nproc", "0"], ["--max-restarts", "-1"], ["--prometheus", "70000"], ["--set", "steps"]])
def test_bad_words_are_one_line(recipe: Path, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert windlass(["train", "run", str(recipe), *words]) == 2
    one_line(capsys)


def test_another_models_checkpoint_is_one_line(
    recipe: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.toml"
    text = recipe.read_text().replace("hidden_size = 64", "hidden_size = 32").replace("../out", str(recipe.parent.parent / "out"))
    other.write_text(text)
    assert windlass(words(other, whole, "--resume", "--json")) == 2
    assert "is a checkpoint of tiny-glm-moe-cpu, not of the recipe's other" in one_line(capsys)


def test_a_corrupt_shard_is_one_line(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(recipe.parent.parent, copy)
    shard = next((copy / "out" / "tiny-cpu" / "tasks").glob("*.tokens.bin"))
    shard.write_bytes(shard.read_bytes()[:-2])
    assert windlass(words(copy / "recipes" / recipe.name, tmp_path / "run", "--json")) == 2
    assert shard.name in one_line(capsys)


def test_a_shard_that_changes_is_one_line(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the same size, so that it is found as it is read. Without checksums, as in earlier versions, a note says so, once."""
    copy = tmp_path / "copy"
    shutil.copytree(recipe.parent.parent, copy)
    tasks = copy / "out" / "tiny-cpu" / "tasks"
    for shard in tasks.glob("train-*.tokens.bin"):
        shard.write_bytes(bytes(byte ^ 0xFF for byte in shard.read_bytes()))
    assert windlass(words(copy / "recipes" / recipe.name, tmp_path / "run", "--json")) == 2
    said = one_line(capsys)
    assert "tokens.bin is damaged" in said and "`windlass train data" in said
    assert windlass(["train", "data", str(tasks), "--verify"]) == 1
    manifest = json.loads((tasks / "manifest.json").read_text())
    for shard in manifest["shards"]:
        del shard["files"]["blocks.bin"]
    (tasks / "manifest.json").write_text(json.dumps(manifest))
    capsys.readouterr()
    assert windlass(words(copy / "recipes" / recipe.name, tmp_path / "other")) == 2
    said = capsys.readouterr().err
    assert said.count("was prepared without checksums of blocks") == 1
    assert "has the token 65,5" in said.splitlines()[-1] and "the model's vocabulary is 512" in said


def test_what_does_not_fit_is_not_started(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert windlass(words(recipe, out, hardware__on="1xH100-80GB[500MB]")) == 3
    assert not out.exists()
    assert windlass(words(recipe, out, "--plan")) == 0
    assert not out.exists()


@pytest.mark.parametrize("path", sorted((tiny_run.ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_fits_what_it_is_for(path: Path) -> None:
    assert windlass(["train", "run", str(path), "--plan"]) == 0


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="deepspeed is installed")
def test_deepspeed_that_is_not_there_is_named(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert windlass(words(recipe, tmp_path / "run", "--json", run__engine="deepspeed")) == 2
    assert "needs deepspeed, which is not installed: pip install 'windlass-llm[deepspeed]'" in one_line(capsys)


def test_worker_words_say_the_same(tmp_path: Path) -> None:
    """What the agent starts is the same command."""
    from windlass.cli.train.options import TrainOptions
    from windlass.cli.train.run import _arguments

    options = TrainOptions(resume=True, settings=("a.b=1", "c.d=2"), out=tmp_path, prometheus=0, tensorboard=True, nproc=2)
    assert _arguments(Path("r.toml"), options) == [
        "-m", "windlass", "train", "run", "r.toml", "--set", "a.b=1", "--set", "c.d=2", "--out", str(tmp_path), "--prometheus", "0",
        "--resume", "--tensorboard",
    ]  # fmt: skip


def test_what_an_earlier_run_left_decides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a torchrun of the user's own, whose folder has the outcome of a run that failed; started again by the agent, it counts."""
    from windlass.cli.train import worker as train_worker
    from windlass.tasks.train.loop.elastic import RunOutcome, read_outcome, write_outcome
    from windlass.tasks.train.loop.loop import RunResult

    monkeypatch.setattr(train_worker, "_run", lambda *_: RunResult(kind="done", step=3))
    monkeypatch.setattr("windlass.tasks.train.loop.elastic.stop_when_agent_dies", lambda: None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    given: Any = SimpleNamespace(folder=tmp_path, options=SimpleNamespace(as_json=True))
    for restarts, code, kind in (("1", 2, "failed"), ("0", 0, "done")):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        write_outcome(tmp_path, RunOutcome("failed", message="a bad recipe", exit_code=2))
        assert train_worker.train(given) == code
        found = read_outcome(tmp_path)
        assert found is not None and found.kind == kind


def test_what_is_planned_before_a_run_is_what_is_run() -> None:
    """A plan that recomputes, or shares rows out, would fit where the run does not."""
    asked = recipe_from({"model": {"name": "x"}, "parallel": {"tp": 2}})
    found = with_trainer_defaults(asked, num_devices=8)
    assert (found.parallel.tp, found.parallel.pp, found.parallel.ep, found.parallel.zero) == (2, 1, 1, 3)
    assert found.parallel.sequence_parallel is False
    assert (found.memory.recompute, found.batch.micro_batch) == ("none", 1)
    said = recipe_from(
        {"model": {"name": "x"}, "memory": {"recompute": "full"}, "batch": {"micro_batch": 4}, "parallel": {"zero": 0}}
    )
    kept = with_trainer_defaults(said, num_devices=8)
    assert (kept.memory.recompute, kept.batch.micro_batch, kept.parallel.zero) == ("full", 4, 0)
    other = recipe_from({"model": {"name": "x"}, "run": {"engine": "deepspeed"}})
    assert with_trainer_defaults(other, num_devices=8) == other
