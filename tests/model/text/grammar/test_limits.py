"""Constraints that would take a library long, much memory or a deep stack: refused in one line, or left out and named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from windlass.core.request import Constraint
from windlass.errors import BadInput
from windlass.foreign import shown
from windlass.model.text.grammar.grammar import Grammar
from windlass.model.text.grammar.limits import MAX_DEPTH, MAX_QUANTIFIERS, MAX_RULES_DEEP, check_lark
from windlass.model.text.grammar.references import MAX_NAME
from windlass.model.text.grammar.room import MAX_NESTING
from windlass.model.text.grammar.schema import enforceable

pytestmark = pytest.mark.pure


def built(constraint: Constraint) -> str:
    grammar = Grammar()
    return grammar.built(grammar.constraint(constraint))


def json_schema(schema: Any) -> Constraint:
    return Constraint(kind="json_schema", value=json.dumps(schema))


def chain(length: int) -> dict[str, Any]:
    links: dict[str, Any] = {f"d{place}": {"$ref": f"#/$defs/d{place + 1}"} for place in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": links | {f"d{length}": {"type": "string"}}}


def rules(length: int, letter: str = "r") -> str:
    links = "".join(f"{letter}{place}: {letter}{place + 1}\n" for place in range(length))
    return f'start: {letter}0\n{links}{letter}{length}: "a"\n'


def doubled(length: int) -> str:
    links = "".join(f"R{place}: R{place + 1} R{place + 1}\n" for place in range(length))
    return f'start: R0\n{links}R{length}: "a"?\n'


REFUSED: list[tuple[Constraint, str]] = [
    (Constraint(kind="regex", value="a?" * 20_000), "regular expression is longer"),
    (Constraint(kind="grammar", value=f"start: /{'a?' * 20_000}/\n"), "regular expression is longer"),
    (json_schema(chain(3_000)), "levels deep through its references"),
    (Constraint(kind="grammar", value=rules(5_000)), "rules lead to each other"),
    (Constraint(kind="grammar", value=rules(5_000, "R")), "rules lead to each other"),
    (Constraint(kind="grammar", value=doubled(16)), "terminal 'R"),
    (Constraint(kind="grammar", value='start: %json {"type": "integer", "multipleOf": 62615533}\n'), "has multipleOf"),
    (Constraint(kind="grammar", value=f"start: %json {json.dumps(chain(3_000))}\n"), "levels deep through its references"),
    (Constraint(kind="json_schema", value='{"items":' * 200 + "{}" + "}" * 200), "nested more than"),
    (Constraint(kind="json_schema", value='{"enum":' + "[" * 200 + "]" * 200 + "}"), "nested more than"),
    (Constraint(kind="grammar", value="start: %json " + '{"items":' * 20_000 + "{}" + "}" * 20_000), "nested more than"),
]  # fmt: skip


@pytest.mark.parametrize(("constraint", "reason"), REFUSED, ids=[f"{place}" for place in range(len(REFUSED))])
def test_what_would_take_too_much_is_refused(constraint: Constraint, reason: str) -> None:
    with pytest.raises(BadInput, match=reason) as caught:
        built(constraint)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 200
    assert caught.value.field == "constraint"


@pytest.mark.parametrize("depth", [3_000, 200_000])
def test_a_schema_that_no_reader_takes_is_refused_too(depth: int) -> None:
    with pytest.raises(BadInput, match="nested"):
        built(Constraint(kind="json_schema", value='{"items":' * depth + "{}" + "}" * depth))
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    with pytest.raises(BadInput, match="nested more than"):
        enforceable(schema)


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ({"type": "integer", "multipleOf": 62615533}, "multipleOf"),
        ({"type": "number", "multipleOf": 0.123457}, "multipleOf"),
        ({"type": "number", "multipleOf": 1e300}, "multipleOf"),
        ({"type": "string", "pattern": "a?" * 20_000}, "pattern"),
        ({"type": "object", "patternProperties": {"a?" * 20_000: {}}}, f"patternProperties.{shown('a?' * 20_000, MAX_NAME)}"),
        ({"type": "object", "patternProperties": {"^(?!x-)": {}, "^x-": {}}}, "patternProperties.^(?!x-)"),
        ({"type": "string", "maxLength": 10**12}, "maxLength"),
        ({"type": "array", "minItems": 10**12}, "minItems"),
        ({"type": "object", "minProperties": 1, "properties": {"a": {}}}, "minProperties"),
    ],
)
def test_a_costly_keyword_is_left_out_and_named(schema: dict[str, Any], name: str) -> None:
    matcher = pytest.importorskip("llguidance").LLMatcher
    found = enforceable(schema)
    assert found.left_out == (name,)
    grammar = Grammar()
    assert not matcher.validate_grammar(grammar.built(grammar.schema(schema, is_strict=False)))


KEPT: list[dict[str, Any]] = [
    {"type": "integer", "multipleOf": 5},
    {"type": "integer", "multipleOf": 1_000_000},
    {"type": "number", "multipleOf": 0.01},
    {"type": "string", "maxLength": 1_000_000, "pattern": "^" + "[a-z]?" * (MAX_QUANTIFIERS // 2) + "$"},
    {"type": "object", "minProperties": 2, "additionalProperties": {"type": "string"}},
    chain(MAX_DEPTH // 2),
]


@pytest.mark.parametrize("schema", KEPT)
def test_ordinary_bounds_are_kept(schema: dict[str, Any]) -> None:
    assert enforceable(schema) == (schema, ())


def test_ordinary_nesting_is_kept() -> None:
    schema: dict[str, Any] = {}
    for _ in range(MAX_NESTING - 2):
        schema = {"items": schema}
    assert enforceable(schema).left_out == ()


def test_a_schema_that_refers_to_itself_has_no_depth() -> None:
    tree = {"$ref": "#/$defs/t", "$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}}
    assert enforceable(tree) == (tree, ())


GRAMMAR = r"""
// a comment with names a? b? c? and "quotes
start: (item ","?)+ | "{" pair* "}"  # another
?pair[lazy]: KEY ":" value
item: value | /[^\/"a-z]+/i | %json {"type": "object", "properties": {"start": {"type": "string"}}}
value: KEY | start
KEY.2: /[a-z]+/ | OTHER{1,100}
OTHER: "b" | "c"
"""


def test_an_ordinary_grammar_passes_with_its_schemas() -> None:
    assert check_lark(GRAMMAR) == [{"type": "object", "properties": {"start": {"type": "string"}}}]
    check_lark(rules(MAX_RULES_DEEP - 10))


def test_rules_that_lead_to_each_other_in_a_circle_pass() -> None:
    check_lark("start: a\na: b | start\nb: a | start\n")
