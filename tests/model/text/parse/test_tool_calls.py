"""Tool calls out of text: three forms, types by schema, nothing lost, whatever the pieces in which text arrives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.model import Frozen
from windlass.core.request import CallPiece
from windlass.model.families.chat.dialect import dialect
from windlass.model.text.parse.tool_calls import FORMS, TaggedCallSplitter, coerce

pytestmark = pytest.mark.pure

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "share": {"type": "number"},
                    "deep": {"type": "boolean"},
                    "items": {"type": "array"},
                    "either": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
                    "maybe": {"type": ["number", "null"]},
                },
            },
        },
    }
]

Arguments = dict[str, Any]


class Call(Frozen):
    name: str
    arguments: Arguments | str


def written(form: str, name: str, arguments: Arguments) -> str:
    """As the published templates write a call."""
    texts = {key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False) for key, value in arguments.items()}
    match form:
        case "json":
            call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
            return f"<tool_call>\n{call}\n</tool_call>"
        case "arg_pairs":
            pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in texts.items())
            return f"<tool_call>{name}\n{pairs}</tool_call>"
        case _:
            pairs = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
            return f"<tool_call>\n<function={name}>\n{pairs}</function>\n</tool_call>"


def split(form: str, pieces: list[str], tools: list[dict[str, Any]] | None = None) -> tuple[str, tuple[Call, ...]]:
    splitter = TaggedCallSplitter(form, TOOLS if tools is None else tools)
    parts = [*(splitter.push(piece) for piece in pieces), splitter.finish()]
    calls = [call for part in parts for call in part[1]]
    assert len({call.id for call in calls}) == len(calls)
    assert collected(splitter.take_pieces()) == [(call.id, call.name, call.arguments) for call in calls]
    found = tuple(Call(name=call.name, arguments=parsed(call.arguments)) for call in calls)
    return "".join(part[0] for part in parts), found


def collected(pieces: Sequence[CallPiece]) -> list[tuple[str, str, str]]:
    """The calls that the pieces add up to."""
    found: dict[str, tuple[str, str, str]] = {}
    for piece in pieces:
        id, name, arguments = found.get(piece.id, (piece.id, "", ""))
        found[piece.id] = id, name + piece.name, arguments + piece.arguments
    return list(found.values())


def parsed(arguments: str) -> Any:
    """Arguments that are no JSON, because they were cut off or are malformed, as they are."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def without_space(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize("form", FORMS)
def test_a_call_in_each_form(form: str) -> None:
    arguments: Arguments = {
        "text": "12 é\nlines",
        "count": 3,
        "share": 0.5,
        "deep": True,
        "items": [1, {"a": None}],
        "either": "x",
    }
    text = f"I look.\n{written(form, 'look', arguments)}\n{written(form, 'look', {})}\n"
    expected = ("I look.", (Call(name="look", arguments=arguments), Call(name="look", arguments={})))
    assert split(form, [text]) == expected
    assert split(form, list(text)) == expected


def test_compact_pairs() -> None:
    """GLM-4.7 writes no line breaks."""
    text = "<tool_call>look<arg_key>count</arg_key><arg_value>7</arg_value><arg_key>text</arg_key><arg_value> 7</arg_value></tool_call>"
    assert split("arg_pairs", [text]) == ("", (Call(name="look", arguments={"count": 7, "text": " 7"}),))


@pytest.mark.parametrize("form", FORMS)
def test_a_closing_tag_within_a_value(form: str) -> None:
    arguments = {"text": 'a "quoted" </tool_call> and <tool_call> too'}
    text = written(form, "look", arguments)
    assert split(form, list(text)) == ("", (Call(name="look", arguments=arguments),))


MALFORMED: dict[str, dict[str, Call | str]] = {
    "json": {
        "<tool_call></tool_call>": "",
        "<tool_call>look</tool_call>": "look",
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>': '{"name": 3, "arguments": {}}',
        '<tool_call>{"name": "look", "arguments": [1]}</tool_call>': '{"name": "look", "arguments": [1]}',
        '<tool_call>{"name": "look", "arguments": NaN}</tool_call>': '{"name": "look", "arguments": NaN}',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>': '{"name": "\\ud800", "arguments": {}}',
        '<tool_call>{"name": "look", "arguments": {"a": b}}</tool_call>': Call(name="look", arguments='{"a": b}'),
    },
    "arg_pairs": {
        "<tool_call></tool_call>": "",
        "<tool_call>two words</tool_call>": "two words",
        "<tool_call>look<arg_key>a</arg_key></tool_call>": Call(name="look", arguments={}),
        "<tool_call>look<arg_key>a</arg_key><arg_value>b</arg_value>c</tool_call>": Call(name="look", arguments={"a": "b"}),
        '<tool_call>{"name": "look"}</arg_value></tool_call>': '{"name": "look"}</arg_value>',
    },
    "xml_function": {
        "<tool_call></tool_call>": "",
        "<tool_call>look</tool_call>": "look",
        "<tool_call><function=look></tool_call>": Call(name="look", arguments={}),
        "<tool_call><function=></function></tool_call>": "<function=></function>",
        "<tool_call><function=look>a</function></tool_call>": Call(name="look", arguments={}),
    },
}
"""What is no call, or hardly one, and what it becomes: text without the tags, or the call that had been announced."""
UNFINISHED: dict[str, dict[str, Call | str]] = {
    "json": {
        '<tool_call>{"name": "look", "arguments": {"text": "a': Call(name="look", arguments='{"text": "a'),
        '<tool_call>{"name": "look", "arguments": {"text": "a"}}\n</tool': Call(name="look", arguments={"text": "a"}),
        '<tool_call>{"name": "lo': "",
        "<tool_call>": "",
    },
    "arg_pairs": {
        "<tool_call>look\n<arg_key>a</arg_key>\n<arg_value>": Call(name="look", arguments="{"),
        "<tool_call>look\n<arg_key>text</arg_key>\n<arg_value>so f": Call(name="look", arguments='{"text": "so f'),
        "<tool_call>look\n<arg_key>text</arg_key>\n<arg_value>so</arg_value>\n": Call(name="look", arguments={"text": "so"}),
        "<tool_call>lo": "",
    },
    "xml_function": {
        "<tool_call><function=look><parameter=text>a</tool_call": Call(name="look", arguments='{"text": "a</tool_call'),
        "<tool_call><function=look><parameter=count>\n1": Call(name="look", arguments="{"),
        "<tool_call><function=lo": "",
    },
}
"""Calls that the length cut off."""


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_call_is_content_without_tags(form: str) -> None:
    good = written(form, "look", {"text": "x"})
    call = Call(name="look", arguments={"text": "x"})
    for bad, expected in {**MALFORMED[form], **UNFINISHED[form]}.items():
        wanted = (expected, ()) if isinstance(expected, str) else ("", (expected,))
        assert split(form, [bad]) == split(form, list(bad)) == wanted
    for bad, expected in MALFORMED[form].items():
        wanted = (f" {expected}".rstrip(), (call,)) if isinstance(expected, str) else ("", (expected, call))
        found = split(form, list(f" {bad} {good}"))
        assert (found[0].rstrip(), found[1]) == wanted
    # One that was never closed takes nothing with it.
    assert split(form, list(f"<tool_call>{good} on")) == ("on", (call,))


def test_a_call_is_streamed_as_it_is_written() -> None:
    """Name first, then the arguments: strings letter by letter, other values when they are complete."""
    splitter = TaggedCallSplitter("arg_pairs", TOOLS)
    text = "<tool_call>look\n<arg_key>text</arg_key>\n<arg_value>so far</arg_value>\n<arg_key>count</arg_key>\n<arg_value>12</arg_value>"
    seen: list[str] = []
    for letter in text:
        splitter.push(letter)
        seen += [piece.name or piece.arguments for piece in splitter.take_pieces()]
    assert seen == ["look", '"text": "', *"so far", '"', ', "count": 12']
    [call] = splitter.push("</tool_call>")[1]
    assert call.arguments == '{"text": "so far", "count": 12}'
    assert [piece.arguments for piece in splitter.take_pieces()] == ["}"]


@st.composite
def conversations(draw: st.DrawFn) -> tuple[str, list[str], list[Call | str]]:
    form = draw(st.sampled_from(sorted(FORMS)))
    words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), min_size=1, max_size=8)
    value = st.one_of(words, st.integers(), st.booleans(), st.lists(st.integers(), max_size=2))
    parts: list[str] = []
    expected: list[Call | str] = []
    for kind in draw(st.lists(st.sampled_from(["text", "bad", "good"]), max_size=5)):
        if kind == "good":
            named = {"text": words, "count": st.integers(), "other": value}
            arguments = draw(st.fixed_dictionaries({}, optional=named))
            arguments = {key: item for key, item in arguments.items() if form == "json" or _survives(key, item)}
            parts.append(written(form, "look", arguments))
            expected.append(Call(name="look", arguments=arguments))
        else:
            parts.append(draw(words) if kind == "text" else draw(st.sampled_from(sorted(MALFORMED[form]))))
            expected.append(parts[-1] if kind == "text" else MALFORMED[form][parts[-1]])
    if draw(st.booleans()):
        parts.append(draw(st.sampled_from(sorted(UNFINISHED[form]))))
        expected.append(UNFINISHED[form][parts[-1]])
    return form, parts, expected


def _survives(key: str, value: Any) -> bool:
    """Whether text without types can be told from what it stands for: a string that reads as JSON cannot."""
    if not isinstance(value, str):
        return True
    edge = value.startswith("\n") or value.endswith("\n")
    return not edge and (key == "text" or coerce(value, None) == value)


@given(conversation=conversations(), places=st.lists(st.integers(0, 999), max_size=8))
def test_nothing_is_lost(conversation: tuple[str, list[str], list[Call | str]], places: list[int]) -> None:
    form, parts, expected = conversation
    text = "".join(parts)
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    pieces = [text[begin:end] for begin, end in pairwise(edges)]
    content, calls = split(form, pieces)
    assert (content, calls) == split(form, [text]) == split(form, list(text))
    assert list(calls) == [part for part in expected if isinstance(part, Call)]
    assert without_space(content) == without_space("".join(part for part in expected if isinstance(part, str)))


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<function=f>", "</function>"),
    *("<parameter=p>", "</parameter>", '{"name": "f"', ', "arguments": {}}', '"', "\\", "{", "}", "f", " ", "\n", "<tool", "é"),
]


@given(
    form=st.sampled_from(sorted(FORMS)),
    text=st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    step=st.integers(1, 9),
)
def test_any_text_in_any_pieces(form: str, text: str, step: int) -> None:
    pieces = [text[start : start + step] for start in range(0, len(text), step)]
    content, calls = split(form, pieces, [])
    assert (content, calls) == split(form, [text], [])
    assert "<tool_call>" not in content


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        (" 5\n", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, "5.5"),
        ("5", {"type": "number"}, 5),
        ("true", {"type": "boolean"}, True),
        ("True", {"type": "boolean"}, True),
        ("yes", {"type": "boolean"}, "yes"),
        ("1", {"type": "boolean"}, "1"),
        ("None", {"type": ["null", "integer"]}, None),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, 5),
        ("five", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "five"),
        ("[1]", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "[1]"),
        ("5", {}, 5),
        ("five", None, "five"),
        ("null", None, None),
        ("5", {"type": 3}, 5),
        ("5", {"type": "unheard-of"}, "5"),
    ],
)
def test_types_by_schema(text: str, schema: Any, expected: Any) -> None:
    found = coerce(text, schema)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize("tools", [[{}], [{"function": 3}], [{"function": {"name": "look", "parameters": {"properties": 3}}}]])
def test_odd_schemas_do_no_harm(tools: list[dict[str, Any]]) -> None:
    assert split("arg_pairs", [written("arg_pairs", "look", {"count": 1})], tools)[1][0].arguments == {"count": 1}


@pytest.mark.parametrize(
    ("template", "style", "thinking"),
    [
        (
            "{{ '\\n<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key>{{ enable_thinking }}<think>",
            "arg_pairs",
            "enable_thinking",
        ),
        ("<tool_call>\\n<function=' + name + '>\\n<parameter=", "xml_function", ""),
        ('<tool_call>\\n{"name": "', "json", ""),
        ("content.split('</think>')[-1]", "tags", ""),
        ("<|im_start|>{{ message.role }}", "plain", ""),
        ("", "plain", ""),
        (None, "plain", ""),
        ("{{ '<|start|>system<|message|>' }}<|channel|>final {{ reasoning_effort }}", "channels", ""),
        ("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", "bracket_args", ""),
        ("[AVAILABLE_TOOLS][TOOL_CALLS] [", "bracket_list", ""),
        ('<|start_header_id|> \'Respond in the format {"name": function name, "parameters": ...}\'', "bare_json", ""),
        ("<|start_header_id|>user<|end_header_id|>", "plain", ""),
    ],
)
def test_the_template_tells_the_style(template: str | None, style: str, thinking: str) -> None:
    found = dialect(template)
    assert (found.style, found.thinking) == (style, thinking)


def test_the_template_tells_whether_and_how_much_the_model_reasons() -> None:
    found = dialect("<|message|><|channel|>analysis {{ reasoning_effort }}")
    assert (found.reasons, found.effort, found.past_reasoning) == (True, "reasoning_effort", "thinking")
    assert dialect("<tool_call> <think> </think>").reasons
    assert not dialect("<tool_call>").reasons
    assert dialect("[TOOL_CALLS][ARGS][THINK][/THINK]").reasons
    assert dialect("<tool_call>").effort == ""


@pytest.mark.parametrize("form", ["arg_pairs", "xml_function"])
def test_a_text_keeps_its_own_space(form: str) -> None:
    arguments = {"text": "  indented\n    code  "}
    assert split(form, [written(form, "look", arguments)])[1] == (Call(name="look", arguments=arguments),)


def test_a_long_call_is_not_read_again_for_every_token() -> None:
    splitter = TaggedCallSplitter("arg_pairs", TOOLS)
    reads = []
    splitter._form = splitter._form._replace(
        partial=lambda body, schemas: reads.append(1) or FORMS["arg_pairs"].partial(body, schemas)
    )
    code = "some lines of code\n" * 2000
    text = f"<tool_call>look\n<arg_key>text</arg_key>\n<arg_value>{code}"
    for start in range(0, len(text), 4):
        splitter.push(text[start : start + 4])
    sent = "".join(piece.arguments for piece in splitter.take_pieces())
    assert len(reads) < 1000 < len(text) // 4 // 9
    assert len(sent) > 0.97 * len(code), "but what is there is sent"
