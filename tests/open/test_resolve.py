"""One place where a name becomes a model: every command resolves it alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from windlass.errors import BadInput, UnknownName
from windlass.model.bundled.models import find_bundled
from windlass.open import resolve

pytestmark = pytest.mark.pure

TINY = Path(__file__).parents[1] / "model" / "families" / "tiny" / "llama.json"


@pytest.fixture
def converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A conversion in Windlass's own directory."""
    monkeypatch.setattr("windlass.model.formats.hub.local.models_directory", lambda: tmp_path)
    folder = tmp_path / "mine-int4"
    folder.mkdir()
    (folder / "config.json").write_text(TINY.read_text())
    return folder


def test_the_order(converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve.find_model(str(converted)).path == converted
    assert resolve.find_model("mine-int4").path == converted
    assert resolve.find_model("tiny-glm").path == find_bundled("tiny-glm")
    known = resolve.find_model("GLM-4.5-Air")
    assert known.known is not None and known.hub == "zai-org/GLM-4.5-Air" and known.path is None
    assert resolve.find_model("somebody/something") == resolve.ModelLocation(hub="somebody/something")
    (converted.parent / "tiny-glm").mkdir()
    assert resolve.find_model("tiny-glm").path == converted.parent / "tiny-glm", "a conversion goes before what is bundled"
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "GLM-4.5-Air").mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    assert resolve.find_model("GLM-4.5-Air").path == Path("GLM-4.5-Air"), "an existing path goes before all names"


@pytest.mark.parametrize("name", ["./no-such", "~/no-such", "/no/such", "no-such.gguf", "no-such.m", "file:///no/such"])
def test_a_path_that_is_not_there_is_no_name(name: str) -> None:
    with pytest.raises(BadInput, match="does not exist; give a model directory"):
        resolve.find_model(name)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"GLM-4\.5-Air"):
        resolve.find_model("GLM-4.5-Ayr")


@pytest.mark.parametrize(("name", "nearest"), [("tiny-glmm", "tiny-glm"), ("tiny_glm/", "tiny-glm"), ("mine-int8", "mine-int4")])
def test_what_is_here_is_suggested_too(converted: Path, name: str, nearest: str) -> None:
    with pytest.raises(UnknownName, match=f"did you mean {nearest}"):
        resolve.find_model(name)


def test_a_slash_and_a_url_of_a_file_are_understood(converted: Path, tmp_path: Path) -> None:
    assert resolve.find_model("tiny-glm/").path == find_bundled("tiny-glm")
    assert resolve.find_model("mine-int4/").path == converted
    assert resolve.find_model("qwen3:8b/").known is not None
    assert resolve.find_model(" Tiny-GLM ").path == find_bundled("tiny-glm")
    (tmp_path / "my model.gguf").touch()
    assert resolve.find_model(f"file://{tmp_path}/my%20model.gguf").path == tmp_path / "my model.gguf"
    assert resolve.find_model(f"FILE://{tmp_path}/my model.gguf").path == tmp_path / "my model.gguf"


@pytest.mark.parametrize(
    "page",
    [
        "https://huggingface.co/somebody/something",
        "https://huggingface.co/somebody/something/tree/main?not-for-all-audiences=true",
        "hf.co/somebody/something/",
        "http://www.HuggingFace.co/somebody/something#files",
    ],
)
def test_the_hubs_page_is_the_model(page: str) -> None:
    assert resolve.find_model(page) == resolve.ModelLocation(hub="somebody/something")


@pytest.mark.parametrize(("file", "words"), [("", "has no config.json"), ("adapter_config.json", "is a LoRA adapter")])
def test_a_folder_without_a_model_is_said(tmp_path: Path, file: str, words: str) -> None:
    if file:
        (tmp_path / file).touch()
    with pytest.raises(BadInput, match=words):
        resolve.model_files(str(tmp_path), shown=False)


def test_all_questions_go_the_same_way(converted: Path) -> None:
    assert resolve.model_files("mine-int4", shown=False) == converted
    assert resolve.describe_model("mine-int4").source == str(converted)
    config, name = resolve.model_config("mine-int4")
    assert config == json.loads(TINY.read_text()) and name == "mine-int4"
    assert resolve.model_config("GLM-4.5-Air")[1] == "GLM-4.5-Air"
    assert resolve.describe_model("tiny-glm").spec.vocab_size == resolve.model_config("tiny-glm")[0]["vocab_size"]
