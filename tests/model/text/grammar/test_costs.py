"""The look at a constraint, in the server's own process: what it costs grows with what is given, and what is too large is refused first."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.readers import READERS
from fuzz.run import Campaign
from windlass.core.request import Constraint
from windlass.errors import BadInput
from windlass.model.text.grammar import check, guard, schema, tool_grammar, values
from windlass.model.text.grammar.check import check_answer
from windlass.model.text.grammar.exclusive import Exclusion
from windlass.model.text.grammar.grammar import Grammar
from windlass.model.text.grammar.limits import has_inner_anchor, is_costly_multiple
from windlass.model.text.grammar.references import MAX_FOLLOWED, MAX_NAME, MAX_PATH, References
from windlass.model.text.grammar.room import MAX_CHARACTERS, MAX_VALUES, Room, Work
from windlass.model.text.grammar.schema import MAX_LEFT_OUT, MAX_SCHEMAS, enforceable
from windlass.model.text.grammar.tool_grammar import OutputSpec, answer_grammar

pytestmark = pytest.mark.pure


def numbered(count: int, value: Any) -> dict[str, Any]:
    return {f"p{number}": json.loads(text) for text in [json.dumps(value)] for number in range(count)}


UNIONS = {"enum": list(range(5000)), "oneOf": [{"const": number} for number in range(32)]}
ADDRESSED = {
    "$defs": {f"d{number}": {"$id": f"http://e.org/{number}/x.json"} for number in range(4000)},
    "allOf": [{"$ref": f"q{number}/x.json"} for number in range(5000)],
}
SHARED = {"$defs": {"a": {"description": "x" * 50_000}}, "properties": numbered(5000, {"$ref": "#/$defs/a"})}
BOMBS: dict[str, tuple[str, Any]] = {
    "long names": ("json_schema", {"properties": {"k" * 60_000: {"properties": numbered(9000, {})}}}),
    "long names left out": ("json_schema", {"properties": {"k" * 100_000: {"properties": numbered(8000, {"not": {}})}}}),
    "values beside options": ("json_schema", UNIONS),
    "addresses": ("json_schema", ADDRESSED),
    "arguments and their definitions": ("json_schema", SHARED),
    "required": ("json_schema", {"minProperties": 1, "properties": numbered(9000, {}), "required": list(numbered(9000, {}))}),
    "digits": ("json_schema", {"anyOf": [{}], "$ref": f"#/anyOf/{'9' * 5000}"}),
    "spaces after a name": ("grammar", "start: x\nA" + " " * 200_000),
    "texts without an end": ("grammar", 'start: "' + '\\"' * 100_000),
    "expressions without an end": ("grammar", "start: /" + "\\/" * 100_000),
    "lines": ("grammar", "\n" * 200_000),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_no_constraint_keeps_the_server_busy(name: str, tmp_path: Path) -> None:
    """In a process with two seconds of CPU time: without limits each needs many times as much, or gigabytes."""
    kind, value = BOMBS[name]
    text = value if isinstance(value, str) else json.dumps(value)
    made = Campaign(
        "constraint-look", 0, tmp_path, given=(json.dumps({"kind": kind, "value": text, "is_strict": False}).encode(),)
    )
    made.run(1)
    assert "constraint-look" in READERS and made.result.inputs == 1
    assert not made.result.findings, "\n".join(map(str, made.result.findings.values()))


# --- room


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"enum": [1] * MAX_VALUES}, "values are not taken"),
        ({"description": "a" * MAX_CHARACTERS}, "characters are not taken"),
        ({"a" * (MAX_CHARACTERS + 1): 1}, "characters are not taken"),
        ({"properties": numbered(MAX_SCHEMAS, {})}, "10,000 schemas"),
        ({"allOf": [{"$ref": f"#{'/a' * 90}"} for _ in range(1 + MAX_FOLLOWED // 90)]}, None),
        ({"allOf": [{"$ref": f"#{'/a' * 90}/{number}"} for number in range(1 + MAX_FOLLOWED // 90)]}, "parts; simplify"),
    ],
)
def test_what_is_too_large_is_refused(value: dict[str, Any], why: str | None) -> None:
    if why is None:
        assert enforceable(value).left_out == (), "a reference is followed once"
        return
    with pytest.raises(BadInput, match=why):
        enforceable(value)


def test_schemas_of_one_request_share_their_room() -> None:
    room = Room()
    half = {"enum": list(range(MAX_VALUES // 2))}
    enforceable(half, room)
    with pytest.raises(BadInput, match="values are not taken"):
        enforceable(half, room)
    with pytest.raises(BadInput, match="values are not taken"):
        enforceable_many({})


def enforceable_many(value: Any) -> None:
    room = Room()
    for _ in range(MAX_VALUES):
        enforceable(value, room)


def test_a_list_that_is_too_long_is_not_gone_through() -> None:
    class Untouched(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError("it is gone through")

    with pytest.raises(BadInput, match="values are not taken"):
        Room().take({"enum": Untouched([1] * (MAX_VALUES + 1))})


def test_a_long_constraint_is_refused_before_it_is_read() -> None:
    with pytest.raises(BadInput, match="characters; at most"):
        Constraint(kind="json_schema", value="[" * (3 * 2**20))


# --- names


def test_names_are_cut_and_few_but_each_keyword_is_there() -> None:
    given = {"properties": {"k" * 16_000: {"properties": numbered(1000, {"not": {}}) | {"last": {"multipleOf": 62615533}}}}}
    left_out = enforceable(given).left_out
    assert len(left_out) == MAX_LEFT_OUT + 1 and left_out[-1].endswith("multipleOf")
    assert max(map(len, left_out)) <= MAX_PATH + MAX_NAME
    with pytest.raises(BadInput, match="multipleOf"):
        Grammar().constraint(Constraint(kind="grammar", value=f"start: %json {json.dumps(given)}\n"))


def test_places_are_named_only_when_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch, "windlass.model.text.grammar.references._step")
    enforceable({"properties": numbered(500, {"type": "string"})})
    assert not calls
    enforceable({"properties": numbered(500, {"not": {}})})
    assert 0 < len(calls) <= 2 * MAX_LEFT_OUT


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    """The first arguments of its calls."""
    module, _, function = name.rpartition(".")
    import importlib

    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    calls: list[Any] = []

    def counting(*args: Any) -> Any:
        calls.append(args[0])
        return found(*args)

    monkeypatch.setattr(name, counting)
    return calls


# --- comparisons


def test_a_value_is_written_once_however_many_options_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    written = counted(monkeypatch, "windlass.model.text.grammar.values.text_of")
    exclusion = Exclusion(lambda reference: None)
    assert exclusion.is_exclusive(UNIONS)
    assert len(written) == 5000 + 32


def test_options_without_an_end_are_named() -> None:
    exclusion = Exclusion(lambda reference: None)
    many = {"oneOf": [{"type": "object", "properties": {"k": {"const": number}}, "required": ["k"]} for number in range(9000)]}
    assert not exclusion.is_exclusive(many)
    assert not Exclusion(lambda reference: None).is_exclusive({"oneOf": [{"enum": list(range(40_000))}, {"const": -1}]})


def test_an_enum_is_written_once_for_all_items(monkeypatch: pytest.MonkeyPatch) -> None:
    written = counted(monkeypatch, "windlass.model.text.grammar.values.text_of")
    asked = {"type": "array", "minItems": 200, "items": {"enum": [str(n) for n in range(20_000)]}, "uniqueItems": True}
    assert check_answer(json.dumps([str(n) for n in range(200)]), asked) == "valid"
    assert len(written) == 20_000 + 2 * 200


@pytest.mark.parametrize(
    "asked",
    [
        {"items": {"required": [f"r{number}" for number in range(20_000)]}},
        {"items": {"properties": numbered(20_000, True)}},
        {"items": {"dependentRequired": numbered(20_000, [])}},
        {"items": {"type": ["string"] * 20_000 + ["object"]}},
        {"items": numbered(20_000, {})},
    ],
)
def test_what_an_answer_is_compared_with_counts(asked: Any) -> None:
    work = Work(40_000)
    wide = [{f"r{number}": 0 for number in range(20_000)}] * 60 if "required" in asked["items"] else [{}] * 200
    assert check_answer(json.dumps(wide), asked, work) == "unknown"
    assert check_answer("[]", asked, work) == "unknown", "answers share it"
    assert check_answer("[]", asked) == "valid"


def test_an_answer_is_written_once_for_all_constants() -> None:
    work = Work(1000)
    assert (
        check_answer(json.dumps(["a" * 20_000]), {"allOf": [{"const": ["b", number]} for number in range(100)]}, work)
        == "invalid"
    )
    long = json.dumps("a" * 20_000)
    assert check_answer(long, {"anyOf": [{"const": number} for number in range(100)]}, Work(1000)) == "unknown"


def test_a_pattern_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = []
    monkeypatch.setattr(check, "enforceable", lambda given: looks.append(given) or enforceable(given))
    assert check_answer(json.dumps(["a"] * 300), {"items": {"pattern": "^a"}}) == "valid"
    assert len(looks) == 1


def test_a_grammar_is_made_once_for_all_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    made = counted(monkeypatch, "windlass.model.text.grammar.tool_grammar._answer_grammar")
    tool_grammar._LATELY.clear()
    constraint = Constraint(kind="regex", value="a+")
    first = [answer_grammar(OutputSpec(style="tags", constraint=constraint), {"</think>": 1}) for _ in range(8)]
    assert len(made) == 1 and len(set(first)) == 1
    answer_grammar(OutputSpec(style="tags", constraint=constraint), {})
    answer_grammar(OutputSpec(style="plain", constraint=constraint), {})
    assert len(made) == 3


def test_definitions_are_given_along_only_where_they_are_referred_to() -> None:
    parameters = {"$defs": {"a": {"type": "integer"}}, "properties": {"x": {"$ref": "#/$defs/a"}, "y": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters, "strict": True}}
    found = json.loads(answer_grammar(OutputSpec(style="arg_pairs", tools=(tool,), tool_choice="required"), {}))
    assert ["$defs" in part.get("json_schema", {}) for part in found["grammars"][1:]] == [True, False]


# --- addresses, anchors, divisors: as before


@pytest.mark.parametrize(
    ("address", "name"),
    [("http://e.org/a/b.json", "ab"), ("b.json", "ab"), ("./b.json", "ab"), ("a/b.json", "ab"), ("../c.json", "c"), ("a/c.json", None),
     (".json", None), ("http://e.org/", None)],
)  # fmt: skip
def test_an_address_is_found_by_its_end(address: str, name: str | None) -> None:
    root = {"$defs": {"ab": {"$id": "http://e.org/a/b.json"}, "c": {"$id": "http://e.org/c.json#"}}}
    found = References(root).target(address)
    assert found is (None if name is None else root["$defs"][name])


def has_inner_anchor_by_marks(regex: str) -> bool:
    """Mark by mark."""
    before, in_class, place = "", False, 0
    while place < len(regex):
        mark = regex[place]
        if in_class:
            in_class = mark != "]"
        elif (mark == "^" and before not in ("", "(", "|", "^", ":", ")")) or (before == "$" and mark not in ")|$"):
            return True
        else:
            in_class = mark == "["
        before = "\\" if mark == "\\" else mark
        place += 2 if mark == "\\" else 1
    return False


@given(st.text(alphabet="^$[]()|:\\ab\n", max_size=12))
def test_anchors_are_found_in_one_go(regex: str) -> None:
    assert has_inner_anchor(regex) == has_inner_anchor_by_marks(regex)


@pytest.mark.parametrize(
    ("divisor", "is_costly"),
    [(7, False), (10_007, True), (0.07, False), (0.5, False), (1e-300, True), (1e300, True), (10**400, True), (2**40, True), (True, False)],
)  # fmt: skip
def test_divisors_are_judged_by_their_digits(divisor: float, is_costly: bool) -> None:
    assert is_costly_multiple(divisor) == is_costly


@given(
    st.recursive(st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from([1.0, 0.5, "1", "a"]), st.lists, max_leaves=4),
    st.data(),
)
def test_texts_are_the_same_where_values_are(one: Any, data: st.DataObject) -> None:
    other = data.draw(st.sampled_from([one, json.loads(json.dumps(one)), [one], 1, True, 1.0, "1"]))
    same_type = json.dumps(one).replace("1.0", "1").replace("-0", "0") == json.dumps(other).replace("1.0", "1").replace("-0", "0")
    assert (values.text_of(one) == values.text_of(other)) == same_type


# --- what nobody thought of


@pytest.mark.parametrize("error", [TypeError("secret"), RecursionError("secret")])
def test_what_the_look_did_not_expect_is_the_clients_fault_and_logged(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(root: Any) -> None:
        raise error

    monkeypatch.setattr(schema, "_Reduction", fail)
    monkeypatch.setattr(guard._log, "propagate", True)
    with caplog.at_level(logging.WARNING), pytest.raises(BadInput, match="cannot be understood") as caught:
        enforceable({"type": "string"})
    assert caught.value.field == "constraint" and "secret" not in caplog.text
    assert type(error).__name__ in caplog.text and "test_costs.py" in caplog.text


FOUND: list[Any] = [
    {"anyOf": [{}], "$ref": f"#/anyOf/{'9' * 5000}"},
    {"oneOf": [{"type": "object", "required": ["a"], "additionalProperties": False, "properties": 5}, {"type": "object"}]},
    {"oneOf": [{"type": 5}, {"enum": 5}, {"required": {"a": 1}}]},
    {"minProperties": 1, "properties": {"a": {}}, "required": [["a"], {}, None]},
]


@pytest.mark.parametrize("value", FOUND, ids=range(len(FOUND)))
def test_nonsense_is_no_surprise(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise AssertionError(args)

    monkeypatch.setattr(guard._log, "warning", fail)
    enforceable(value)
    check_answer('{"a": 1}', value)


@pytest.mark.parametrize("style", ["json", "arg_pairs", "xml_function", "bare_json"])
def test_a_tool_beside_a_strict_one_is_no_surprise_either(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    deep: dict[str, Any] = {}
    for _ in range(400):
        deep = {"items": deep}
    tools = tuple(
        {"function": {"name": name, "parameters": {"properties": {"a": deep}}, "strict": not name}} for name in ("f", "")
    )
    with pytest.raises(BadInput, match="nested more than"):
        answer_grammar(OutputSpec(style=style, tools=tools), {})
