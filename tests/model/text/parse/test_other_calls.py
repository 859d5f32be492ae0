"""Calls behind a mark, calls that are the whole answer, and messages with channels: found as they are written, and never lost."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from windlass.core.request import ToolCall
from windlass.model.text.parse.bare_json import BareJsonSplitter
from windlass.model.text.parse.brackets import BracketSplitter
from windlass.model.text.parse.channels import ChannelSplitter
from windlass.model.text.parse.json_end import JsonEnd

pytestmark = pytest.mark.pure

Called = list[tuple[str, Any]]


def told(calls: Sequence[ToolCall]) -> Called:
    return [(call.name, parsed(call.arguments)) for call in calls]


def parsed(arguments: str) -> Any:
    """Arguments that are no JSON, because they were cut off or are malformed, as they are."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def check_pieces(splitter: Any, calls: list[ToolCall]) -> None:
    """They add up to the calls."""
    found: dict[str, list[str]] = {}
    for piece in splitter.take_pieces():
        name, arguments = found.get(piece.id, ["", ""])
        found[piece.id] = [name + piece.name, arguments + piece.arguments]
    assert found == {call.id: [call.name, call.arguments] for call in calls}


def split(splitter: Any, text: str, pieces: int = 1) -> tuple[str, Called]:
    found = [splitter.push(text[start : start + pieces]) for start in range(0, len(text), pieces)] + [splitter.finish()]
    check_pieces(splitter, [call for _, calls in found for call in calls])
    return "".join(content for content, _ in found), [call for _, calls in found for call in told(calls)]


BRACKETS = {
    '[TOOL_CALLS][{"name": "f", "arguments": {"k": 1}}]': ("", [("f", {"k": 1})]),
    ' [TOOL_CALLS] [{"name": "f", "arguments": {"k": "]}"}}, {"name": "g"}] ': ("", [("f", {"k": "]}"}), ("g", {})]),
    '[TOOL_CALLS]f[ARGS]{"k": {"l": "\\\\"}}[TOOL_CALLS]g-2[ARGS]{}': ("", [("f", {"k": {"l": "\\"}}), ("g-2", {})]),
    'Well.\n[TOOL_CALLS]f{"k": 1}': ("Well.", [("f", {"k": 1})]),
    '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"k": 1}\nDone': ("Done", [("f", {"k": 1})]),
    '[TOOL_CALLS]f[ARGS]{"k": 1': ("", [("f", '{"k": 1')]),
    '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"k': ("", [("f", {}), ("g", '{"k')]),
    '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"na': ("", [("f", {})]),
    "[TOOL_CALLS]f[ARGS]{k}": ("", [("f", "{k}")]),
    "[TOOL_CALLS]f[AR": ("", []),
    '[TOOL_CALLS][{"name": 3}] then [TOOL_CALLS][{"name": "f"}]': ('[{"name": 3}] then', [("f", {})]),
    "[TOOL_CALLS]": ("", []),
    "[TOOL_CALLS] two words {}": (" two words {}", []),
    "[TOOL_CALLS][]": ("[]", []),
    "[TOOL_": ("", []),
    " plain [text] {}\n": (" plain [text] {}\n", []),
}
BARE = {
    '{"name": "f", "parameters": {"k": "}"}}': ("", [("f", {"k": "}"})]),
    ' <|python_tag|>{"name": "f", "parameters": {}}': ("", [("f", {})]),
    '{"name": "f", "arguments": {}}; {"name": "g", "parameters": {"a": [1]}}': ("", [("f", {}), ("g", {"a": [1]})]),
    '{"name": "f"}\n': ("", [("f", {})]),
    '{"title": "f"}': ('{"title": "f"}', []),
    '{"name": "f", "parameters": {"k": 1}': ("", [("f", {"k": 1})]),
    "{not json} at all": ("{not json} at all", []),
    'Look: {"name": "f", "parameters": {}}': ('Look: {"name": "f", "parameters": {}}', []),
    'Look: <|python_tag|>{"name": "f", "parameters": {}}': ("Look: ", [("f", {})]),
    "<|python_tag|>print(1)": ("print(1)", []),
    '{"name": "f"} and more': (" and more", [("f", {})]),
    "  two words ": ("  two words ", []),
    "": ("", []),
}


@pytest.mark.parametrize("pieces", [1, 3, 1000])
@pytest.mark.parametrize("text", BRACKETS, ids=repr)
def test_calls_behind_a_mark(text: str, pieces: int) -> None:
    assert split(BracketSplitter(), text, pieces) == BRACKETS[text]


@pytest.mark.parametrize("pieces", [1, 3, 1000])
@pytest.mark.parametrize("text", BARE, ids=repr)
def test_calls_that_are_the_answer(text: str, pieces: int) -> None:
    assert split(BareJsonSplitter(), text, pieces) == BARE[text]


def test_ids_are_such_as_the_template_takes() -> None:
    splitter = BracketSplitter()
    _, (call,) = splitter.push('[TOOL_CALLS]f[ARGS]{"k": 1}')
    assert len(call.id) == 9
    assert call.id.isalnum()


def test_a_call_comes_out_when_it_is_whole() -> None:
    splitter = BracketSplitter()
    assert splitter.push('[TOOL_CALLS]f[ARGS]{"k": 1') == ("", ())
    [piece] = splitter.take_pieces()
    assert (piece.name, piece.arguments) == ("f", '{"k": 1')
    assert told(splitter.push("}[TOOL_CALLS]g[AR")[1]) == [("f", {"k": 1})]
    assert told(splitter.push("GS]{}")[1]) == [("g", {})]


# --- channels

C, M, S, E = "<|channel|>", "<|message|>", "<|start|>assistant", "<|end|>"
CHANNELS = {
    f"{C}final{M}Hello.": ("", "Hello.", []),
    f"{C}analysis{M}Hmm.{E}{S}{C}final{M}Hello.<|return|>": ("Hmm.", "Hello.", []),
    f'{C}analysis{M}a{E}{S}{C}commentary to=functions.f <|constrain|>json{M}{{"k": 1}}<|call|>': ("a", "", [("f", {"k": 1})]),
    f'{C}analysis{M}a{E}{S}{C}commentary to=functions.f <|constrain|>json{M}{{"k": 1}}': ("a", "", [("f", {"k": 1})]),
    f" to=functions.f{C}commentary json{M}{{}}": ("", "", [("f", {})]),
    f'{C}commentary{M}I will look.{E}{S}{C}commentary to=functions.a{M}{{}}<|call|>{S}{C}commentary to=functions.b{M}{{"x": 2}}': (
        "", "I will look.", [("a", {}), ("b", {"x": 2})],
    ),
    f"{C}commentary to=functions.f{M}{{broken<|call|>": ("", "", [("f", "{broken")]),
    f"{C}commentary to=functions.f{M}[1]": ("", "[1]", []),
    f"{C}analysis{M}one{E}{S}{C}analysis{M}two": ("one\n\ntwo", "", []),
    "No channel at all": ("", "No channel at all", []),
    S: ("", "", []),  # cut off within a header
    f" {S} more{S}": ("", "more", []),
    f"{C}final{M}Done.{E}{S}": ("", "Done.", []),
    f"{C}final": ("", "", []),
    f'{C}commentary to=functions.f{M}{{"k": "a': ("", "", [("f", '{"k": "a')]),
    f"{C}commentary to=functions.f{M}": ("", "", [("f", {})]),
    f"{C}final{M}a < b <|en": ("", "a < b <|en", []),
    "": ("", "", []),
}  # fmt: skip


def channelled(text: str, pieces: int, has_tools: bool = True) -> tuple[str, str, Called]:
    splitter = ChannelSplitter(has_tools)
    found = [splitter.push(text[start : start + pieces]) for start in range(0, len(text), pieces)] + [splitter.finish()]
    check_pieces(splitter, [call for part in found for call in part[2]])
    thought, content = ("".join(part[place] for part in found) for place in (0, 1))  # type: ignore[misc]
    return thought, content, [call for part in found for call in told(part[2])]


@pytest.mark.parametrize("pieces", [1, 3, 1000])
@pytest.mark.parametrize("text", CHANNELS, ids=repr)
def test_channels(text: str, pieces: int) -> None:
    assert channelled(text, pieces) == CHANNELS[text]


def test_without_tools_what_looks_like_a_call_is_content() -> None:
    text = f'{C}commentary to=functions.f{M}{{"k": 1}}'
    assert channelled(text, 2, has_tools=False) == ("", '{"k": 1}', [])


# --- properties

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.sampled_from(['"', "}", "]", "\\", '\\"']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=5), JSON, max_size=4)


@given(value=OBJECTS | st.lists(JSON, max_size=4), rest=st.text(max_size=10), places=st.integers(1, 5))
def test_json_ends_where_it_ends(value: Any, rest: str, places: int) -> None:
    text = json.dumps(value) + rest
    end, seen = JsonEnd(), None
    for stop in range(places, len(text) + places, places):
        seen = end.find(text[:stop])
        if seen is not None:
            break
    assert seen == len(json.dumps(value))


@given(arguments=OBJECTS, before=st.text("ab \n", max_size=5), pieces=st.integers(1, 9))
def test_every_call_is_read_as_it_was_written(arguments: dict[str, Any], before: str, pieces: int) -> None:
    body = json.dumps(arguments, ensure_ascii=False)
    assume_text(body)
    wanted = (before.rstrip(), [("f", arguments)])
    assert split(BracketSplitter(), f"{before}[TOOL_CALLS]f[ARGS]{body}", pieces) == wanted
    assert split(BracketSplitter(), f'{before}[TOOL_CALLS][{{"name": "f", "arguments": {body}}}]', pieces) == wanted
    assert split(BareJsonSplitter(), f'{{"name": "f", "parameters": {body}}}', pieces) == ("", [("f", arguments)])
    header = f"{C}commentary to=functions.f <|constrain|>json{M}"
    assert channelled(header + body, pieces) == ("", "", [("f", arguments)])


def assume_text(body: str) -> None:
    from hypothesis import assume

    assume(not any("\ud800" <= character <= "\udfff" for character in body))


@given(
    text=st.lists(
        st.sampled_from(["[TOOL_CALLS]", "{", "}", '"', "f", "[", "]", ";", "<|python_tag|>", "[ARGS]", " ", "x"]), max_size=9
    ).map("".join)
)
@example("{<|python_tag|>}")
def test_marks_are_never_content(text: str) -> None:
    for make, mark in ((BracketSplitter, "[TOOL_CALLS]"), (BareJsonSplitter, "<|python_tag|>")):
        content, calls = split(make(), text)
        assert mark not in content
        assert split(make(), text, len(text) or 1) == (content, calls)
        if not calls and mark not in text:
            assert content == text
