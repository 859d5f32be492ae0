"""`--engine vllm`: what is read from files, what is planned, and what is started, without vLLM."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from windlass.core.hardware.parse import parse_hardware
from windlass.errors import Impossible
from windlass.open import hardware as open_hardware
from windlass.open.vllm import start

pytestmark = pytest.mark.cpu

TINY = Path(__file__).parents[2] / "model" / "families" / "tiny"
LARGE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336, "head_dim": 128}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(TINY / "llama.json", tmp_path / "config.json")
    return tmp_path


def large(folder: Path) -> Path:
    config = json.loads((folder / "config.json").read_text())
    config |= LARGE | {"num_hidden_layers": 32, "max_position_embeddings": 131072, "vocab_size": 128256}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def on(monkeypatch: pytest.MonkeyPatch, hardware: str) -> None:
    monkeypatch.setattr(open_hardware, "resolve_hardware", lambda _: parse_hardware(hardware))
    monkeypatch.setattr(start, "_device_bytes", lambda: 0)


def test_files_that_are_no_directory_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(Impossible, match="use --engine windlass"):
        start.served_model(tmp_path / "model.gguf")


def test_what_the_files_say(folder: Path) -> None:
    assert start.served_model(folder, "mine") == start.ServedModel(path=str(folder.resolve()), name="mine")
    config = json.loads((folder / "config.json").read_text())
    packed = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int"}}}}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": packed}))
    assert start.served_model(folder).stored == "int4" and start.served_model(folder).name == folder.name


def test_the_context_is_the_models_where_nobody_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "1xH100-80GB")
    plan = start.plan_vllm(folder, context=None, concurrency=None)
    assert plan.engine == "vllm" and plan.fits and plan.workload.concurrency == 64
    assert plan.spec is not None and plan.workload.context_tokens == plan.spec.context_tokens < 8192


def test_as_many_sequences_as_fit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An 8B: 64 of 8k tokens take 64 GiB of cache beside 15 GiB of weights."""
    on(monkeypatch, "1xL40S")
    plan = start.plan_vllm(large(folder), context=None, concurrency=None)
    assert plan.fits and plan.workload.concurrency == 16 and plan.workload.context_tokens == 8192
    asked = start.plan_vllm(folder, context=None, concurrency=64)
    assert not asked.fits or asked.memory.host_bytes


def test_a_command_for_this_machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "1xH100-80GB")
    monkeypatch.setattr(start, "find_python", lambda: "/env/bin/python")
    plan = start.plan_vllm(folder, context=64, concurrency=2)
    one, two = (start.vllm_command(plan, start.served_model(folder, "m")) for _ in range(2))
    assert one.argv[0] == "/env/bin/python" and one.argv[one.argv.index("--host") + 1] == "127.0.0.1"
    assert one.env["VLLM_API_KEY"] != two.env["VLLM_API_KEY"] and len(one.env["VLLM_API_KEY"]) >= 32
    monkeypatch.setattr(start, "find_python", lambda: None)
    with pytest.raises(start.VllmNotInstalled, match="windlass setup vllm"):
        start.vllm_command(plan, start.served_model(folder))
