"""Schemas that a grammar cannot enforce completely: what is left of them, and the check of the finished answer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.errors import BadInput
from windlass.model.text.grammar.check import check_answer
from windlass.model.text.grammar.grammar import Grammar
from windlass.model.text.grammar.schema import FORMATS, UNENFORCED, enforceable

pytestmark = pytest.mark.pure

UNIQUE: dict[str, Any] = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
CASES: list[tuple[dict[str, Any], str]] = [
    (UNIQUE, "uniqueItems"),
    ({"not": {"type": "string"}}, "not"),
    ({"properties": {"a": UNIQUE}}, "properties.a.uniqueItems"),
    ({"anyOf": [{"type": "string", "format": "phone"}]}, "anyOf[0].format"),
    ({"type": "string", "pattern": "^(?=a).*$"}, "pattern"),
    ({"type": "string", "pattern": r"(a)\1"}, "pattern"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
    ({"type": "array", "contains": {"type": "string"}}, "contains"),
    ({"$defs": {"x": UNIQUE}, "$ref": "#/$defs/x"}, "$defs.x.uniqueItems"),
]


@pytest.mark.parametrize(("schema", "name"), CASES)
def test_what_cannot_be_enforced_is_named_and_left_out(schema: dict[str, Any], name: str) -> None:
    found = enforceable(schema)
    assert found.left_out == (name,)
    assert enforceable(found.schema) == (found.schema, ())


def test_the_rest_stays_as_it_is() -> None:
    kept = {
        "type": "object", "properties": {"not": {"type": "string", "format": "uuid"}, "if": {"enum": [{"not": 1}]}},
        "required": ["not"], "additionalProperties": False, "default": {"uniqueItems": True},
    }  # fmt: skip
    assert enforceable(kept) == (kept, ())
    assert enforceable({"uniqueItems": False}).left_out == ()


@pytest.mark.parametrize(("schema", "name"), CASES)
def test_llguidance_takes_what_is_left(schema: dict[str, Any], name: str) -> None:
    """And refuses the whole, which is why anything is left out."""
    matcher = pytest.importorskip("llguidance").LLMatcher
    grammar = Grammar()
    assert not matcher.validate_grammar(grammar.built(grammar.schema(schema, is_strict=False)))
    assert matcher.validate_grammar(json.dumps({"grammars": [{"json_schema": schema}]}))
    with pytest.raises(BadInput, match="cannot be enforced"):
        Grammar().schema(schema, is_strict=True)


def test_its_formats_are_those_we_know() -> None:
    matcher = pytest.importorskip("llguidance").LLMatcher
    for name in (*FORMATS, "phone", "password", "byte", "iri", "regex", "json-pointer", "idn-email", "int32"):
        refused = matcher.validate_grammar(json.dumps({"grammars": [{"json_schema": {"type": "string", "format": name}}]}))
        assert bool(refused) == (name not in FORMATS), name


GBNF = 'root ::= "yes" | "no " number\nnumber ::= [0-9]+\n'


def test_gbnf_is_a_grammar_too() -> None:
    from windlass.core.request import Constraint

    matcher = pytest.importorskip("llguidance").LLMatcher
    grammar = Grammar()
    assert not matcher.validate_grammar(grammar.built(grammar.constraint(Constraint(kind="grammar", value=GBNF))))
    with pytest.raises(BadInput, match="GBNF grammar is invalid"):
        Grammar().constraint(Constraint(kind="grammar", value="root ::= ["))


# --- the check -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "value", "verdict"),
    [
        (UNIQUE, ["a", "b"], "valid"),
        (UNIQUE, ["a", "a"], "invalid"),
        ({"uniqueItems": True}, [1, 1.0], "invalid"),
        ({"uniqueItems": True}, [1, True], "valid"),
        ({"not": {"type": "string"}}, "x", "invalid"),
        ({"if": {"required": ["a"]}, "then": {"required": ["b"]}}, {"a": 1}, "invalid"),
        ({"if": {"required": ["a"]}, "else": {"required": ["b"]}}, {"c": 1}, "invalid"),
        ({"dependentRequired": {"a": ["b"]}}, {"a": 1}, "invalid"),
        ({"propertyNames": {"maxLength": 1}}, {"ab": 1}, "invalid"),
        ({"contains": {"type": "string"}, "maxContains": 1}, ["a", "b"], "invalid"),
        ({"$defs": {"n": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}, {"n": {"n": 1}}, "invalid"),
        ({"type": "string", "pattern": "^(?=a)"}, "b", "unknown"),
        ({"type": "string", "pattern": "^a"}, "a", "valid"),
        ({"propertyNames": {"pattern": "^a"}}, {"b": 1}, "unknown"),
        ({"not": {"pattern": "^a"}}, "b", "unknown"),
        ({"contains": {"format": "date"}}, ["b"], "unknown"),
        ({"oneOf": [{"pattern": "^a"}, {"pattern": "^b"}]}, "a", "unknown"),
        ({"oneOf": [{"pattern": "^a"}, {"type": "integer"}]}, "a", "valid"),
        ({"oneOf": [{"pattern": "^a"}, {"type": "string"}, {"minLength": 1}]}, "a", "invalid"),
        ({"patternProperties": {"^a": UNIQUE}}, {"a": ["b", "b"]}, "unknown"),
        ({"patternProperties": {"^a": UNIQUE}, "properties": {"b": {}}}, {"b": 1}, "valid"),
        ({"$ref": "https://example.org/x"}, 1, "unknown"),
        ({"$ref": "#"}, 1, "unknown"),
        ({"type": 3}, 1, "unknown"),
    ],
)  # fmt: skip
def test_answers_are_checked(schema: dict[str, Any], value: Any, verdict: str) -> None:
    assert check_answer(json.dumps(value), schema) == verdict


def test_half_an_answer_is_not_valid() -> None:
    assert check_answer('["a", "b', UNIQUE) == "invalid"


def test_a_schema_cannot_keep_the_check_busy() -> None:
    doubling: dict[str, Any] = {f"d{depth}": {"anyOf": [{"$ref": f"#/$defs/d{depth + 1}"}] * 2} for depth in range(40)}
    schema = {"$defs": {**doubling, "d40": {"type": "string"}}, "$ref": "#/$defs/d0"}
    assert check_answer("1", schema) == "unknown"


SCHEMAS = st.recursive(
    st.sampled_from([{"type": "string"}, {"type": "integer"}, {"const": 1}, {"enum": ["a", None]}, {"minLength": 2}, {"minimum": 1}, True]),
    lambda inner: st.builds(lambda key, value: {key: value}, st.sampled_from(["not", "items", "contains", "additionalProperties"]), inner)
    | st.builds(lambda key, values: {key: values}, st.sampled_from(["anyOf", "oneOf", "allOf"]), st.lists(inner, min_size=1, max_size=2))
    | st.builds(lambda value: {"properties": {"a": value}, "required": ["a"]}, inner)
    | st.builds(lambda first, second: {"if": first, "then": second}, inner, inner),
    max_leaves=5,
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "a", "ab"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)


@given(schema=SCHEMAS, value=VALUES)
def test_the_check_agrees_with_jsonschema(schema: Any, value: Any) -> None:
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    assert check_answer(json.dumps(value), schema) == ("valid" if validator(schema).is_valid(value) else "invalid")


def test_every_keyword_left_out_is_known() -> None:
    assert {"uniqueItems", "not", "if", "then", "contains", "dependentRequired", "propertyNames"} <= UNENFORCED


# --- where they are, and how they are written --------------------------------------------------------------------------

CONTAINERS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"$ref": "#/definitions/misc/tags", "definitions": {"misc": {"tags": UNIQUE}}}, ("definitions.misc.tags.uniqueItems",)),
    ({"properties": {"a": {"$ref": "#/properties/b/x"}, "b": {"x": UNIQUE}}}, ("properties.b.x.uniqueItems",)),
    ({"$ref": "#tags", "allOf": [{"$defs": {"x": {"$anchor": "tags", **UNIQUE}}}]}, ("allOf[0].$defs.x.uniqueItems",)),
    ({"$ref": "#/$defs/a~1b%20c", "$defs": {"a/b c": UNIQUE}}, ("$defs.a/b c.uniqueItems",)),
    ({"$ref": "#/definitions/Box<Item>", "definitions": {"Box<Item>": UNIQUE}}, ("definitions.Box<Item>.uniqueItems",)),
    ({"$id": "https://a.org/", "$ref": "other.json", "$defs": {"o": {"$id": "https://a.org/other.json", "$ref": "#/x/y", "x": {"y": UNIQUE}}}},
     ("$defs.o.x.y.uniqueItems",)),
    ({"properties": {"a": {"$ref": "https://example.org/x"}}}, ("properties.a.$ref",)),
    ({"$ref": "http://json-schema.org/draft-07/schema#"}, ("$ref",)),
    ({"$recursiveRef": "#"}, ("$recursiveRef",)),
    ({"type": "string", "pattern": "a^b"}, ("pattern",)),
    ({"type": "string", "pattern": r"^(a|b$)|^[$^]\$\^$"}, ()),
    ({"type": "array", "uniqueItems": False, "$ref": "#/x/y", "x": {"y": {"unevaluatedItems": True}}}, ()),
    ({"$schema": "https://json-schema.org/draft-07/schema", "type": "string"}, ()),
    ({"$schema": "http://json-schema.org/schema#", "type": "string", "enum": [{"$ref": "a b", "$schema": "x"}, "a"]}, ()),
    ({"type": "object", "minProperties": 1, "additionalProperties": False, "patternProperties": {"^(?!x)": {"type": "string"}}},
     ("patternProperties.^(?!x)",)),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "names"), CONTAINERS)
def test_wherever_a_schema_is_it_is_taken(schema: dict[str, Any], names: tuple[str, ...]) -> None:
    matcher = pytest.importorskip("llguidance").LLMatcher
    assert enforceable(schema).left_out == names
    grammar = Grammar()
    assert not matcher.validate_grammar(grammar.built(grammar.schema(schema, is_strict=False)))


def test_what_matched_a_pattern_that_is_left_out_still_has_a_place() -> None:
    value = {"type": "string"}
    found = enforceable({"patternProperties": {"^(?!x)": value, "^x": {}}, "additionalProperties": False})
    assert found.schema == {"patternProperties": {"^x": {}}, "additionalProperties": {"anyOf": [value]}}
