"""The command line of `windlass serve`: models with names, adapters, and what contradicts itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from windlass.cli.serve.openers import vllm
from windlass.cli.serve.options import GivenModel, ServeOptions, adapters_of, check_options, named_models
from windlass.core.launch import Launch
from windlass.errors import BadInput

pytestmark = pytest.mark.pure


def test_models_may_have_names(tmp_path: Path) -> None:
    odd = tmp_path / "a=b"
    odd.mkdir()
    found = named_models(["./one", "small=./two", str(odd)])
    assert found == [GivenModel(model="./one"), GivenModel(model="./two", name="small"), GivenModel(model=str(odd))]


def test_adapters_belong_to_the_first_model_unless_they_say() -> None:
    given = named_models(["small=./two", "./one"])
    found = adapters_of(["legal=/a/legal", "small:tone=/a/tone", "./one:x=/a/x"], given)
    assert found == [(("legal", "/a/legal"), ("tone", "/a/tone")), (("x", "/a/x"),)]


@pytest.mark.parametrize("text", ["legal", "legal=", "=dir", "other:legal=dir"])
def test_adapters_that_cannot_be_understood(text: str) -> None:
    with pytest.raises(BadInput, match="--lora"):
        adapters_of([text], named_models(["small=./two"]))


def test_two_adapters_of_one_name() -> None:
    with pytest.raises(BadInput, match="two adapters"):
        adapters_of(["a=x", "a=y"], named_models(["m"]))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (ServeOptions(models=("a", "b"), name="x"), "NAME=MODEL"),
        (ServeOptions(models=("a", "b"), engine="vllm"), "--engine windlass"),
        (ServeOptions(models=("a",), engine="vllm", lora=("x=y",)), "--engine windlass"),
        (ServeOptions(models=("a", "b"), keep=0), "--keep"),
        (ServeOptions(models=("a",), keep=1), "--keep is for several models"),
        (ServeOptions(models=("a",), memory="1GB"), "--memory is for several models"),
        (ServeOptions(models=("a",), unload_after=5.0), "--unload-after is for several models"),
    ],
)
def test_what_contradicts_itself_is_refused(options: ServeOptions, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        check_options(options)


def test_vllm_has_a_deterministic_mode_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ServeOptions(models=("a",), engine="vllm", launch=Launch(deterministic=True))
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    with pytest.raises(BadInput, match="set VLLM_BATCH_INVARIANT=1"):
        vllm(options, Path("nowhere"))
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(BadInput, match="nowhere is a file"):
        vllm(options, Path("nowhere"))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"lora_dir": Path("nowhere")}, "is not a folder"),
        ({"lora_dir": Path(), "engine": "vllm"}, "--lora-dir"),
        ({"lora_dir": Path(), "plan": Path("plan.json")}, "--lora-dir"),
    ],
)
def test_a_folder_of_adapters_that_cannot_be_used(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(BadInput, match=word):
        check_options(ServeOptions(models=("m",), **changes))
