"""Which published files a name stands for on a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from windlass.core.hardware.parse import parse_hardware
from windlass.model.families.registry import KnownModel, find, known_models
from windlass.open import resolve
from windlass.open.choose import ChosenFiles, choose_files

pytestmark = pytest.mark.pure


def known(name: str) -> KnownModel:
    found = find(name)
    assert found is not None, name
    return found


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("qwen3:8b", "Qwen3-8B"),
        ("qwen3:30b", "Qwen3-30B-A3B"),
        ("llama3.3:70b", "Llama-3.3-70B-Instruct"),
        ("llama3.1:405b", "Llama-3.1-405B"),
        ("mixtral:8x7b", "Mixtral-8x7B"),
        ("gpt-oss:120b", "gpt-oss-120b"),
        ("smollm2:135m", "SmolLM2-135M-Instruct"),
        ("glm-4.5-air", "GLM-4.5-Air"),
    ],
)
def test_names_as_other_tools_write_them(typed: str, name: str) -> None:
    assert known(typed).name == name


@pytest.mark.parametrize("typed", ["qwen3:0.5b", "qwen3", "nothing:70b", "a:b:c", ":", ""])
def test_what_is_not_a_name(typed: str) -> None:
    assert find(typed) is None


@pytest.mark.parametrize(
    ("model", "hardware", "expected"),
    [
        ("qwen3:8b", "cpu:8,ram=64GB", "Qwen3-8B-Q8_0.gguf"),
        ("qwen3:8b", "cpu:8,ram=8GB", "Qwen3-8B-Q4_K_M.gguf"),
        ("qwen3:8b", "cpu:8,ram=4GB", "Qwen3-8B-Q4_K_M.gguf"),  # the smallest; the rest is read from disk
        ("qwen3:8b", "1xRTX-4090", "Qwen/Qwen3-8B"),  # GGUF becomes bf16 there
        ("glm-4.5-air", "8xH100-80GB", "zai-org/GLM-4.5-Air-FP8"),
        ("llama3.3:70b", "cpu:8,ram=64GB", "meta-llama/Llama-3.3-70B-Instruct"),  # nothing quantized is published
    ],
)
def test_the_files_that_fit(model: str, hardware: str, expected: str) -> None:
    chosen = choose_files(known(model), parse_hardware(hardware))
    assert (chosen.file or chosen.hub) == expected
    assert expected in chosen.why


def test_published_files_are_named_least_lossy_first() -> None:
    bits = {"fp8": 8, "int8": 8, "int4": 4}
    for model in known_models():
        listed = [bits[files.scheme] for files in model.quantized]
        assert listed == sorted(listed, reverse=True), model.name


@pytest.mark.parametrize(("name", "file"), [("qwen3:8b", True), ("Qwen3-8B", True), ("Qwen/Qwen3-8B", False)])
def test_a_name_of_the_registry_is_chosen_for_and_a_hub_name_is_itself(
    name: str, file: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(
        "windlass.open.choose.choose_files", lambda model, hardware: ChosenFiles(hub="a/b", file="c.gguf", why="chosen")
    )
    monkeypatch.setattr(resolve, "download_file", lambda hub, one, shown: asked.append((hub, one)) or Path("c.gguf"))
    monkeypatch.setattr(resolve, "download", lambda hub, workers, shown: asked.append((hub, "")) or Path("whole"))
    resolve.runnable_files(name, shown=True)
    assert asked == [("a/b", "c.gguf") if file else ("Qwen/Qwen3-8B", "")]
    assert ("chosen" in capsys.readouterr().err) == file
