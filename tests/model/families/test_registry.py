"""The models known by name: every one loads, and every spelling of its name finds it."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

from windlass.core.count import count_parameters
from windlass.model.families import MODEL_TYPES, describe, rules
from windlass.model.families.registry import KnownModel, find, known_models, published_config, spec_of, unknown_model

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("model", known_models(), ids=lambda model: model.name)
def test_loads(model: KnownModel) -> None:
    spec = spec_of(model)
    assert spec.name == model.name
    assert spec.family in MODEL_TYPES
    assert model.check in {"count", "read", "cross", "memory"}
    assert 10**8 < count_parameters(spec, rules(spec)).active < 10**12
    assert spec.context_tokens >= 2048


@pytest.mark.parametrize("model", known_models(), ids=lambda model: model.name)
def test_every_spelling_finds_it(model: KnownModel) -> None:
    for name in (model.name, model.hub, *model.aliases):
        for spelling in (name, name.lower(), name.upper()):
            assert find(spelling) is model, spelling


def test_names_are_unique() -> None:
    """A short name may be another model's full one only where case alone tells them apart; none does today."""
    for kind in ("name", "hub"):
        values = [getattr(model, kind).lower() for model in known_models()]
        assert len(set(values)) == len(values)
    spellings = [spelling for model in known_models() for spelling in {name.lower() for name in model.names()}]
    assert len(set(spellings)) == len(spellings)


def test_short_hub_names() -> None:
    for short, hub in (
        ("llama-2-70b-hf", "meta-llama/Llama-2-70b-hf"),
        ("falcon-180b", "tiiuae/falcon-180B"),
        ("bloom", "bigscience/bloom"),
    ):
        model = find(short)
        assert model is not None and model.hub == hub


def test_unknown_names_offer_near_ones() -> None:
    assert find("GLM-4.5-Heir") is None
    assert "GLM-4.5-Air" in str(unknown_model("GLM-4.5-Heir"))
    assert "Qwen3-30B-A3B" in str(unknown_model("qwen3-30b-a4b"))
    assert "did you mean" not in str(unknown_model("@@@@"))
    assert "known: " in str(unknown_model("@@@@"))


def test_every_config_file_belongs_to_a_model() -> None:
    present = {entry.name for entry in files("windlass.model.families").joinpath("configs").iterdir()}
    used = {model.config or model.hub.replace("/", "--") + ".json" for model in known_models()}
    assert present == used


def test_every_family_is_known_by_some_model_or_alias() -> None:
    described = {published_config(model).get("model_type", "evo2") for model in known_models()}
    assert MODEL_TYPES.keys() - described == {"RefinedWeb", "RefinedWebModel"}


def test_configs_are_as_published() -> None:
    """Plain JSON that survives a round trip; describing does not change it."""
    for model in known_models():
        values = published_config(model)
        before = json.dumps(values)
        describe(values)
        assert json.dumps(values) == before
