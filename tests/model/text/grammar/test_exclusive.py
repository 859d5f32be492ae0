"""When `oneOf` means what `anyOf` means."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.model.text.grammar.schema import MAX_LEFT_OUT, enforceable

pytestmark = pytest.mark.pure


def tagged(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": kind}, **more}, "required": ["kind"]}


def closed(*names: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {} for name in names}, "required": list(names), "additionalProperties": False}


EXCLUSIVE: list[dict[str, Any]] = [
    {"oneOf": [{"type": "string"}, {"type": "integer"}, {"type": "null"}]},
    {"oneOf": [{"const": 1}, {"const": 2}, {"const": "1"}]},
    {"oneOf": [{"enum": ["a", "b"]}, {"enum": ["c"]}, {"type": "object"}]},
    {"oneOf": [tagged("a"), tagged("b"), tagged("c")]},
    {"oneOf": [tagged("a"), tagged("b"), {"type": "string"}]},
    {"oneOf": [tagged("a"), {"properties": {"kind": {"type": "integer"}}, "type": "object"}]},
    {"oneOf": [closed("a"), closed("b")]},
    {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": tagged("a"), "b": {"allOf": [tagged("b")]}}},
    {"oneOf": [{"$ref": "#/$defs/a"}, tagged("b")], "$defs": {"a": {"type": "object", "properties": {"kind": {"$ref": "#/$defs/k"}},
     "required": ["kind"]}, "k": {"enum": ["a", "c"]}}},
    {"type": "object", "required": ["kind"], "oneOf": [{"properties": {"kind": {"const": 1}}}, {"properties": {"kind": {"const": 2}}}]},
    {"oneOf": [{"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": "object"}]},
    {"oneOf": [{"type": "array"}, {"type": ["string", "null"]}]},
    {"oneOf": [tagged(str(number)) for number in range(200)]},
    {"oneOf": [{}]},
]  # fmt: skip
NOT_EXCLUSIVE: list[dict[str, Any]] = [
    {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    {"oneOf": [{"const": 1}, {"const": 1.0}]},
    {"oneOf": [{"type": "string"}, {"const": "a"}]},
    {"oneOf": [{}, {"type": "string"}]},
    {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"oneOf": [tagged("a"), {"type": "object"}]},
    {
        "oneOf": [
            {"properties": {"kind": {"const": "a"}}, "type": "object"},
            {"properties": {"kind": {"const": "b"}}, "type": "object"},
        ]
    },
    {"oneOf": [closed("a"), {"type": "object", "properties": {"a": {}}}]},
    {"oneOf": [tagged("a"), tagged("b"), tagged("a")]},
    {"oneOf": [{"$ref": "#"}, {"$ref": "#/oneOf/0"}]},
    {"oneOf": [{"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": ["null", "object"]}]},
    {"oneOf": [{"type": "array", "maxItems": 1}, {"type": "array", "minItems": 2}]},
]


@pytest.mark.parametrize("schema", EXCLUSIVE)
def test_options_that_exclude_each_other_need_no_name(schema: dict[str, Any]) -> None:
    assert enforceable(schema) == (schema, ())


@pytest.mark.parametrize("schema", NOT_EXCLUSIVE)
def test_options_that_may_overlap_are_named(schema: dict[str, Any]) -> None:
    found = enforceable({"type": "object", "properties": {"x": schema}})
    assert "properties.x.oneOf" in found.left_out


def test_many_unions_are_named_rather_than_compared_for_long() -> None:
    options = [
        {"type": "object", "properties": {f"p{number}": {"const": number}}, "required": [f"p{number}"]} for number in range(32)
    ]
    left_out = enforceable({"properties": {f"u{number}": {"oneOf": options} for number in range(100)}}).left_out
    assert len(left_out) == MAX_LEFT_OUT


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from([0.5, 1.0, "a", "b"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)
OPTIONS = st.recursive(
    st.sampled_from([{"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": ["null", "object"]}, {"const": 1}, {"enum": ["a", 0.5]}])
    | st.just(True),
    lambda inner: st.builds(lambda key, values: {key: values}, st.sampled_from(["anyOf", "oneOf", "allOf"]), st.lists(inner, min_size=1, max_size=2))
    | st.builds(
        lambda a, b, required, closed: {
            "type": "object", "properties": {"a": a, "b": b}, "required": required, "additionalProperties": not closed
        },
        inner, inner, st.lists(st.sampled_from("ab"), max_size=2, unique=True), st.booleans(),
    ),
    max_leaves=4,
)  # fmt: skip


@given(options=st.lists(OPTIONS, min_size=2, max_size=3), value=VALUES)
def test_no_value_is_of_two_options_that_exclude_each_other(options: list[Any], value: Any) -> None:
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    if "oneOf" not in enforceable({"oneOf": options}).left_out:
        assert sum(validator(option).is_valid(value) for option in options) <= 1, json.dumps(options)
