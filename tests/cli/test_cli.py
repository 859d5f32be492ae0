"""The commands as a user runs them: exit codes, one-line errors, JSON, files, what is imported."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import HUNG_SECONDS
from windlass.cli import execute as run

pytestmark = pytest.mark.pure


def windlass(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "windlass", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=HUNG_SECONDS, **options)  # type: ignore[call-overload, no-any-return]


def test_plan_json_has_the_stable_keys() -> None:
    made = windlass("plan", "GLM-4.5-Air", "--on", "1xH200", "--quant", "int4", "--json")
    assert made.returncode == 0 and made.stderr == ""
    plan = json.loads(made.stdout)
    stable = "model fits engine layout scheme memory speed cost energy train cloud reasons alternatives"
    assert {*stable.split(), "placement", "kv_blocks", "checkpoint", "ranks"} <= set(plan)
    assert plan["model"]["parameters"] == 106_852_251_264
    assert {"name", "bits", "group", "kv"} <= set(plan["scheme"])
    parts = {f"{part}_bytes" for part in ("weights", "kv", "activation", "overhead", "total", "capacity")}
    assert parts <= set(plan["memory"]["per_device"][0])


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["plan", "GLM-4.5-Air", "--on", "8xH10O"], 2, "unknown device"),
        (["plan", "GLM-4.5-Bair", "--on", "1xH200"], 2, "GLM-4.5-Air"),
        (["plan", "GLM-4.5-Air", "--on", "1xH200", "--context", "900k"], 2, "131,072"),
        (["plan", "GLM-4.5-Air", "--on", "1xH200", "--goal", "speed"], 2, "latency"),
        (["plan", "GLM-4.5-Air", "--on", "1xH200", "--region", "atlantis"], 2, "region"),
        (["plan", "GLM-4.5-Air", "--tp", "two"], 2, "--tp"),
        (["plan"], 2, "MODEL"),
        (["plan", "GLM-4.5-Air", "--on", "1xH200", "--no-such-option"], 2, "--no-such-option"),
        (["frobnicate"], 2, "frobnicate"),
        (["models", "show", "nothing-like-this"], 2, "unknown model"),
        (["models", "qwen3:8b"], 2, "`windlass models show qwen3:8b`"),
        (["run", "tiny-glm", "one", "--prompt", "two"], 2, "given twice"),
        (["ls"], 2, "it is `windlass models` here"),
        (["chat", "tiny-glm"], 2, "it is `windlass run` here"),
        (["run", "tiny-glm", "--device", "gpu", "--prompt", "x"], 2, "cuda (an NVIDIA or AMD GPU)"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == code
    printed = capsys.readouterr()
    assert printed.out == "" and words in printed.err and printed.err.count("\n") == 1


def test_what_others_call_a_command_is_one_of_ours() -> None:
    from typer.main import get_command

    from windlass.cli.app import ELSEWHERE, app

    ours = get_command(app).commands  # type: ignore[attr-defined]
    assert not set(ELSEWHERE) & set(ours)
    assert {words.split()[0] for words in ELSEWHERE.values()} <= set(ours)


def test_does_not_fit_is_exit_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "Llama-3.1-405B", "--on", "1xRTX-4090,ram=32GB,disk=50GB", "--json"]) == 3
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] is False and plan["short_bytes"] > 10**9 and plan["would_fit"]
    assert run(["plan", "Qwen3-32B", "--on", "1xRTX-4090,ram=8GB,disk=1GB", "--quant", "bf16"]) == 3
    assert "does not fit" in capsys.readouterr().out


def test_save_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    assert run(["plan", "Qwen3-8B", "--on", "1xRTX-4090", "--save", str(saved), "--plot", str(picture)]) == 0
    assert json.loads(saved.read_text())["fits"] is True
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "plan.png"]
    assert "saved" in capsys.readouterr().out


def test_unwritable_save_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "Qwen3-8B", "--on", "1xRTX-4090", "--save", str(tmp_path / "no" / "such" / "plan.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_path_comes_before_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder called like a known model is the folder."""
    folder = tmp_path / "GLM-4.5-Air"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 100, "max_position_embeddings": 512}))
    monkeypatch.chdir(tmp_path)
    assert run(["plan", "GLM-4.5-Air", "--on", "1xH200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["family"] == "llama"


def test_damaged_config_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("{", "[]", '{"model_type": "llama"}', '{"model_type": 3}', "\x00"):
        (tmp_path / "config.json").write_text(text)
        assert run(["plan", str(tmp_path), "--on", "1xH200"]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_models_lists_everything(capsys: pytest.CaptureFixture[str]) -> None:
    from windlass.model.families.registry import known_models

    assert run(["models", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} == {"tiny-glm", *(model.name for model in known_models())}
    air = next(row for row in rows if row["name"] == "GLM-4.5-Air")
    assert air["smallest_hardware"].startswith("1xA100-80GB")
    assert run(["models", "--filter", "air"]) == 0
    listed = capsys.readouterr().out
    assert "GLM-4.5-Air" in listed and "Falcon" not in listed


def test_models_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "show", "deepseek-ai/DeepSeek-V3", "--tensors"]) == 0
    shown = capsys.readouterr().out
    assert "671,026,419,200" in shown and "kv_a_proj_with_mqa" in shown


def test_cloud(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "INTELLECT-3", "--cloud", "--json"]) == 0
    offers = json.loads(capsys.readouterr().out)["cloud"]
    assert offers and offers[0]["usd_per_hour"] <= offers[-1]["usd_per_hour"]


def test_this_machine_is_probed(tmp_path: Path) -> None:
    made = windlass("plan", "SmolLM2-135M-Instruct", "--json", env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)})
    assert made.returncode == 0
    assert json.loads(made.stdout)["memory"]["per_device"][0]["capacity_bytes"] > 10**8


def test_a_closed_pipe_is_quiet() -> None:
    made = subprocess.run(
        f"{shlex.quote(sys.executable)} -m windlass models | head -1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=HUNG_SECONDS,
        check=False,
    )
    assert made.stderr == "" and made.stdout.startswith("model")


@pytest.mark.parametrize("arguments", [["--help"], ["devices"]])
def test_a_reader_that_is_gone_is_no_failure(arguments: list[str]) -> None:
    """`set -o pipefail` would end a script over `windlass ... | head`."""
    reading, writing = os.pipe()
    os.close(reading)
    made = subprocess.run(
        [sys.executable, "-m", "windlass", *arguments],
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=HUNG_SECONDS,
        check=False,
    )
    os.close(writing)
    assert made.returncode == 0 and made.stderr == b""


HEAVY = frozenset(
    "torch numpy transformers tokenizers safetensors matplotlib triton huggingface_hub jinja2 starlette uvicorn httpx pynvml llguidance".split()
)
PLANNING = frozenset("cli core errors foreign model open tasks units".split())


@pytest.mark.parametrize(
    ("arguments", "packages", "most"),
    [
        (["--help"], {"cli", "core", "errors", "foreign", "units"}, 75),
        (["plan", "--help"], {"cli", "core", "errors", "foreign", "units"}, 75),
        (["plan", "GLM-4.5-Air", "--on", "1xH200", "--quant", "int4", "--json"], PLANNING, 190),
    ],
    ids=["help", "plan-help", "plan"],
)
def test_starts_in_a_blink(arguments: list[str], packages: set[str], most: int) -> None:
    """Which is to say: with few modules. bench/speed.py has the seconds."""
    code = "import json, sys; from windlass.cli import execute as run; code = run(sys.argv[1:])"
    code += "; print(); print(json.dumps([code, *sys.modules]))"
    made = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=HUNG_SECONDS, check=True
    )
    exit_code, *modules = json.loads(made.stdout.splitlines()[-1])
    ours = [name for name in modules if name.startswith("windlass.")]
    assert exit_code == 0 and {name.split(".")[0] for name in modules} & HEAVY == set()
    assert {name.split(".")[1] for name in ours} <= packages and len(ours) < most
