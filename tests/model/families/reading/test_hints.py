"""What tensor names say about a checkpoint that its config does not, or says wrongly."""

from __future__ import annotations

import pytest

from windlass.core.count import count_parameters
from windlass.core.rule import stored_tensors
from windlass.model.families import Hints, describe, hints_from, rules
from windlass.model.families.registry import find, known_models, published_config, spec_of

pytestmark = pytest.mark.pure


def published(name: str) -> dict[str, object]:
    model = find(name)
    assert model is not None
    return published_config(model)


def test_no_names_say_nothing() -> None:
    assert hints_from((), 46) == Hints()


def test_a_claimed_layer_that_is_not_there() -> None:
    """INTELLECT-3.1: its config claims an MTP layer (llama.cpp#19733), its files have none."""
    claims = published("INTELLECT-3") | {"num_nextn_predict_layers": 1}
    assert describe(claims).next_token is not None
    names = {tensor.name for tensor in stored_tensors(rules(describe(published("INTELLECT-3"))))}
    spec = describe(claims, hints=hints_from(names, 46))
    assert spec.next_token is None
    assert count_parameters(spec, rules(spec)).checkpoint == 106_852_251_264


def test_copies_that_are_not_there() -> None:
    """GLM-4.6's config is GLM-4.5's in this; only the names tell that the copies of embedding and head are left out."""
    model = find("GLM-4.6")
    assert model is not None
    names = {tensor.name for tensor in stored_tensors(rules(spec_of(model)))}
    spec = describe(published("GLM-4.6"), hints=hints_from(names, 92))
    assert spec.next_token is not None and not spec.next_token.own_embeddings
    assert count_parameters(spec, rules(spec)).checkpoint == 356_785_898_816


@pytest.mark.parametrize("model", known_models(), ids=lambda model: model.name)
def test_a_models_own_names_change_nothing(model: object) -> None:
    """Reading a checkpoint that is as published gives the spec that the registry gives."""
    assert isinstance(model, type(known_models()[0]))
    spec = spec_of(model)
    names = {tensor.name for tensor in stored_tensors(rules(spec))}
    assert describe(published_config(model), model.name, hints=hints_from(names, spec.num_layers)) == spec
