"""`windlass bench`: mistakes are one line; a tiny model with random weights is measured, saved, compared, traced and drawn."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from waiting import HUNG_SECONDS
from windlass.cli import execute as cli
from windlass.cli.bench.run import kept_as, parse_batches
from windlass.core.launch import Launch
from windlass.core.layout import Layout
from windlass.core.scheme import Scheme, scheme
from windlass.errors import BadInput
from windlass.model.families import describe, rules
from windlass.open import stored
from windlass.tasks.bench.setup import BenchSetup

pytestmark = pytest.mark.cpu

INT8, Q4_1 = scheme("int8", 32), scheme("q4_1")

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module", autouse=True)
def _torch() -> None:
    """Looked for when the first of these tests runs: collecting them takes no torch."""
    pytest.importorskip("torch")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "tiny.json"
    file.write_text(json.dumps(CONFIG))
    return file


def test_batches() -> None:
    assert parse_batches("1") == (1,) and parse_batches("1,8,32,8") == (1, 8, 32)
    for text in ("", "a", "1,,2", "0", "-1", "99999", "1.5"):
        with pytest.raises(BadInput, match="--batch"):
            parse_batches(text)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["./none"], "does not exist"),
        (["GLM-4.5-Bair", "--random-weights"], "GLM-4.5-Air"),
        (["GLM-4.5-Air", "--quant", "fp8"], "is quantized to int4 or int8 while it loads"),
        (["GLM-4.5-Air", "--random-weights", "--host-memory", "1MB"], "is too little to run anything"),
        (["GLM-4.5-Air", "--random-weights", "--device", "cpu", "--gpu-memory", "8GB"], "has no effect with --device cpu"),
        (["GLM-4.5-Air", "--random-weights", "--quant", "int3"], "unknown quantization"),
        (["GLM-4.5-Air", "--random-weights", "--batch", "x"], "--batch"),
        (["GLM-4.5-Air", "--random-weights", "--new-tokens", "1"], "--new-tokens"),
        (["GLM-4.5-Air", "--random-weights", "--device", "tpu"], "--device"),
        (["GLM-4.5-Air", "--random-weights", "--kv", "int3"], "--kv"),
        (["GLM-4.5-Air", "--random-weights", "--save", "/no/such/folder/x.json"], "does not exist"),
        (["GLM-4.5-Air", "--random-weights", "--compare", "/no/such/file.json"], "cannot be read"),
        (["Evo2-40B", "--random-weights"], "cannot be run"),
        (["GLM-4.5-Air", "--random-weights", "--workers", "a:9998"], "--workers needs --secret-file"),
        (["GLM-4.5-Air", "--random-weights", "--tp", "3", "--ep", "2"], "--ep 2 must divide --tp 3"),
        (["GLM-4.5-Air", "--random-weights", "--tp", "2", "--sync", "int3"], "--sync is exact or int8"),
        (["GLM-4.5-Air", "--random-weights", "--sync", "int8"], "--sync int8 is for several ranks"),
        (["GLM-4.5-Air", "--random-weights", "--tp", "2", "--profile", "x.json"], "measure one process"),
    ],
)
def test_mistakes_are_one_line(words: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["bench", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and expected in printed.err and printed.err.count("\n") == 1


def test_a_tiny_model_is_measured(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from windlass.tasks.bench import limits

    monkeypatch.setattr(limits, "SECONDS", 0.02)  # how quick this machine is matters to nobody here
    monkeypatch.setattr("windlass.tasks.bench.bench.measure_limits", cache(limits.measure_limits))
    saved, trace, picture = tmp_path / "one.json", tmp_path / "trace.json", tmp_path / "memory.png"
    words = ["bench", str(config), "--random-weights", "--quant", "int4", "--group", "32", "--batch", "1,2"]
    words += ["--prompt-tokens", "20", "--new-tokens", "12", "--device", "cpu"]
    assert cli([*words, "--save", str(saved), "--profile", str(trace), "--memory", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert "tok/s" in shown and "GB/s" in shown and "planned" in shown and "outside kernels" in shown
    report = json.loads(saved.read_text())
    assert [found["batch"] for found in report["runs"]] == [1, 2] and report["random_weights"] is True
    for found in report["runs"]:
        assert found["decode_tokens_per_second"] > 0 and found["reached"]["read_share"] > 0
        assert 0 <= found["python_share"] < 1
    names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"step", "runner.run", "scheduler.schedule", "linear", "attention"} <= names
    assert picture.read_bytes().startswith(b"\x89PNG")

    assert cli([*words, "--compare", str(saved)]) == 0
    assert "improvement" in capsys.readouterr().out
    assert cli([*words, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["model"] == "tiny" and printed.err == ""


HASTY = "import windlass.cli; from windlass.tasks.bench import limits; limits.SECONDS = 0.02; windlass.cli.main()"
"""The command line, which measures this machine for a moment only."""


@pytest.mark.multi
def test_over_two_processes_it_says_where_the_time_goes(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a process of its own: it becomes a rank."""
    words = [
        "bench",
        str(config),
        "--random-weights",
        "--quant",
        "bf16",
        "--tp",
        "2",
        "--prompt-tokens",
        "9",
        "--new-tokens",
        "12",
    ]
    found = subprocess.run(
        [sys.executable, "-c", HASTY, *words, "--device", "cpu", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=HUNG_SECONDS,
    )
    assert found.returncode == 0, found.stderr
    split = json.loads(found.stdout)["split"]
    assert split["layout"] == "tp=2" and split["predicted_tokens_per_second"] > 0
    assert [(one["rank"], one["node"]) for one in split["ranks"]] == [(0, "root"), (1, "root")]
    for one in split["ranks"]:
        assert min(one["compute_seconds"], one["wire_seconds"], one["sent_bytes"], one["received_bytes"]) > 0
        assert one["waiting_seconds"] >= 0


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["bench", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--random-weights" in shown and "windlass bench" in shown


@pytest.mark.parametrize(
    ("launch", "how", "expected"),
    [
        (Launch(model="m"), INT8, INT8),
        (Launch(model="m.gguf"), None, Q4_1),  # as a plan of the file names it
        (Launch(model="m.gguf", quant="int4"), None, None),
        (Launch(model="m", speculate="auto"), INT8, None),
        (Launch(model="m", exact=True), INT8, None),
        (Launch(model="m", layout=Layout(tp=2)), INT8, None),
    ],
)
def test_what_later_plans_may_use(
    launch: Launch, how: Scheme | None, expected: Scheme | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "stored_files", lambda _: stored.StoredFiles(format="gguf", config={}, scheme=Q4_1))
    spec = describe(CONFIG, "m")
    assert kept_as(BenchSetup(name="m", spec=spec, rules=rules(spec), launch=launch, scheme=how)) == expected
