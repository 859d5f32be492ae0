"""Models on disk: those of the hub's cache and our own, listed with what they take, and removed whole and alone."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import hub_processes
import pytest

from windlass.model.formats.hub.local import models_directory

pytestmark = pytest.mark.pure

SCRIPT = """
import json, sys
from windlass.errors import Error
from windlass.model.formats.hub.local import local_models, remove
try:
    freed = [remove(name, dry_run=dry == "dry") for name, dry in json.loads(sys.argv[1])]
except Error as error:
    freed = str(error)
models = {m.name: [str(m.path), m.num_bytes, m.last_used, m.format] for m in local_models()}
print(json.dumps([freed, models]))
"""


def run(home: Path, *removals: tuple[str, str], script: str = SCRIPT) -> Any:
    """Bytes that were freed, or what is wrong, and the models that are there then."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    settings = {"HF_HOME": str(home / "hf"), "XDG_DATA_HOME": str(home / "data")}
    code, output, trouble = hub_processes.run(script, json.dumps(removals), environment=kept | settings)
    assert code == 0, trouble
    return json.loads(output)


def cached(home: Path, name: str, **files: int) -> Path:
    """A model in the hub's cache; returns its snapshot."""
    repository = home / "hf" / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / "abc"
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    for number, (file, num_bytes) in enumerate(files.items()):
        (repository / "blobs" / str(number)).write_bytes(bytes(num_bytes))
        (snapshot / file.replace("__", ".")).symlink_to(f"../../blobs/{number}")
    return snapshot


def own(home: Path, name: str, **files: int) -> Path:
    folder = home / "data" / "windlass" / "models" / name
    folder.mkdir(parents=True)
    for file, num_bytes in files.items():
        (folder / file.replace("__", ".")).write_bytes(bytes(num_bytes))
    return folder


def test_nothing_there(tmp_path: Path) -> None:
    assert run(tmp_path) == [[], {}]


def test_both_places(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "org/model", config__json=2, model__safetensors=100)
    cached(tmp_path, "org/old", config__json=2, pytorch_model__bin=7)
    cached(tmp_path, "org/config", config__json=3)
    folder = own(tmp_path, "model-int4", config__json=5, model__safetensors=50)
    own(tmp_path, "org/model-dllama", model__m=9)
    (tmp_path / "hf" / "hub" / "datasets--org--text").mkdir()
    _, models = run(tmp_path)
    assert {name: (size, form) for name, (_, size, _, form) in models.items()} == {
        "org/model": (102, "safetensors"),
        "org/old": (9, "pytorch"),
        "org/config": (3, "incomplete"),
        "model-int4": (55, "safetensors"),
        "org/model-dllama": (9, "dllama"),
    }
    assert models["org/model"][0] == str(snapshot) and models["model-int4"][0] == str(folder)
    assert all(last_used > 1e9 for _, _, last_used, _ in models.values())


def test_the_last_used_comes_first(tmp_path: Path) -> None:
    for name, when in (("a", 3e9), ("b", 4e9), ("c", 2e9)):
        os.utime(own(tmp_path, name, model__gguf=1) / "model.gguf", (when, when))
    assert list(run(tmp_path)[1]) == ["b", "a", "c"]


def test_unfinished_downloads_count_and_can_be_removed(tmp_path: Path) -> None:
    repository = cached(tmp_path, "org/model", config__json=2, model__safetensors=100).parent.parent
    (repository / "blobs" / "ff.12.incomplete").write_bytes(bytes(1000))
    only_part = tmp_path / "hf" / "hub" / "models--org--part" / "blobs"
    only_part.mkdir(parents=True)
    (only_part / "ff.12.incomplete").write_bytes(bytes(500))
    own(tmp_path, "half", **{"__model__safetensors__part": 30})
    _, models = run(tmp_path)
    assert {name: (size, form) for name, (_, size, _, form) in models.items()} == {
        "org/model": (1102, "safetensors"),
        "org/part": (500, "incomplete"),
        "half": (30, "incomplete"),
    }
    freed, left = run(tmp_path, ("org/model", ""), ("org/part", ""), ("half", ""))
    assert freed == [1102, 500, 30] and left == {}
    assert not list((tmp_path / "hf" / "hub").glob("models--*"))


def test_removal_takes_one_model_and_no_other(tmp_path: Path) -> None:
    for name in ("org/model", "org/model2"):
        cached(tmp_path, name, model__safetensors=10)
    for name in ("a", "b"):
        own(tmp_path, name, model__safetensors=20)
    freed, left = run(tmp_path, ("org/model", "dry"), ("a", "dry"))
    assert freed == [10, 20] and len(left) == 4
    freed, left = run(tmp_path, ("org/model", ""), ("a", ""))
    assert freed == [10, 20] and set(left) == {"org/model2", "b"}


def test_a_link_among_our_own_is_removed_and_not_what_it_leads_to(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "model.safetensors").write_bytes(bytes(20))
    own(tmp_path, "b", model__safetensors=1)
    (tmp_path / "data" / "windlass" / "models" / "a").symlink_to(elsewhere)
    assert set(run(tmp_path, ("a", ""))[1]) == {"b"}
    assert (elsewhere / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["absent", "..", ".", "", "org", "/", "../models"])
def test_only_names_that_are_listed(tmp_path: Path, name: str) -> None:
    cached(tmp_path, "org/model", model__safetensors=10)
    own(tmp_path, "a", model__safetensors=20)
    message, models = run(tmp_path, (name, ""))
    assert message.startswith(f"unknown local model {name!r}; ")
    assert len(models) == 2


def test_without_the_package_our_own_are_listed(tmp_path: Path) -> None:
    cached(tmp_path, "org/model", model__safetensors=10)
    own(tmp_path, "a", model__safetensors=20)
    assert list(run(tmp_path, script="import sys; sys.modules['huggingface_hub'] = None" + SCRIPT)[1]) == ["a"]


def test_where_our_own_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert models_directory() == tmp_path / "windlass" / "models"
    for value in ("", "relative/paths/are/to/be/ignored"):
        monkeypatch.setenv("XDG_DATA_HOME", value)
        assert models_directory() == Path.home() / ".local" / "share" / "windlass" / "models"
