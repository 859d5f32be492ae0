"""Tokens to text as they arrive: any pieces give the same parts, stops never leak, special tokens stay out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.request import ToolCall
from windlass.errors import UnknownName
from windlass.model.text.parse.stop_filter import partial_match_length
from windlass.model.text.parse.stream import TextPiece, TextStream
from windlass.model.text.parse.styles import STYLES
from windlass.model.text.parse.tool_calls import FORMS
from windlass.model.text.tokenize.gguf_tokenizer import tokenizer_files
from windlass.model.text.tokenize.tokenizer import UNFINISHED, Tokenizer

pytestmark = pytest.mark.cpu

tokenizers = pytest.importorskip("tokenizers")


def byte_tokenizer(*special: str) -> Tokenizer:
    """A token for every byte, so that characters and tags are spread over as many tokens as can be; and some special ones."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*letters, *special],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * len(special),
    }
    return Tokenizer(tokenizers.Tokenizer.from_str(msgspec.json.encode(tokenizer_files(metadata)["tokenizer.json"]).decode()), {})


def fallback_tokenizer() -> Tokenizer:
    """SentencePiece with a few letters; every other character is its bytes."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", *pieces, "▁", "a", "b", "▁a"],
        "tokenizer.ggml.scores": [0.0] * 258 + [-1.0, -2.0, -3.0, -0.5],
        "tokenizer.ggml.token_type": [2, 3] + [6] * 256 + [1] * 4,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return Tokenizer(tokenizers.Tokenizer.from_str(msgspec.json.encode(tokenizer_files(metadata)["tokenizer.json"]).decode()), {})


END = "<|end|>"
PLAIN_BYTES = byte_tokenizer(END)
TAGS_ARE_SPECIAL = byte_tokenizer(END, "<think>", "</think>", "<tool_call>", "</tool_call>")
FALLBACK = fallback_tokenizer()


def whole(pieces: Sequence[TextPiece]) -> TextPiece:
    return TextPiece(
        content="".join(piece.content for piece in pieces),
        reasoning="".join(piece.reasoning for piece in pieces),
        tool_calls=tuple(msgspec.structs.replace(call, id="") for piece in pieces for call in piece.tool_calls),
        stopped=any(piece.stopped for piece in pieces),
    )


def streamed(tokenizer: Tokenizer, groups: Sequence[Sequence[int]], **options: Any) -> TextPiece:
    stream = TextStream(tokenizer, **options)
    return whole([*(stream.push(group) for group in groups), stream.finish()])


def groups_of(tokens: list[int], places: list[int]) -> Iterator[list[int]]:
    edges = sorted({0, len(tokens), *(place % (len(tokens) + 1) for place in places)})
    return (tokens[begin:end] for begin, end in pairwise(edges))


TEXTS = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            '{"name": "f", "arguments": {"é": "🚢"}}',
            "[TOOL_CALLS]",
            "[TOOL_CALLS] [",
            "f[ARGS]",
            "]",
            '{"name": "f", "parameters": {"a": "}\\\\""}}',
            "; ",
            "<|python_tag|>",
            "<|channel|>",
            "<|start|>assistant",
            "commentary to=functions.f",
            "analysis",
            "<|message|>",
            "<|call|>",
            "STOP",
            "STO",
            "\n\n",
            END,
        ]
    )
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters=UNFINISHED), max_size=5),
    max_size=10,
).map("".join)
STOPS = st.lists(st.sampled_from(["STOP", "TOPS", "\n\n", "é", "🚢", "a", ""]), max_size=3)


@given(
    text=TEXTS, places=st.lists(st.integers(0, 999), max_size=8), stop=STOPS, style=st.sampled_from(STYLES), inside=st.booleans()
)
def test_any_tokens_in_any_pieces(text: str, places: list[int], stop: list[str], style: str, inside: bool) -> None:
    """One token at a time, all at once, or anything between."""
    options: dict[str, Any] = {"stop": stop, "style": style, "starts_in_reasoning": inside}
    for tokenizer in (PLAIN_BYTES, TAGS_ARE_SPECIAL):
        tokens = tokenizer.encode(text, special=False)
        expected = streamed(tokenizer, [tokens], **options)
        assert streamed(tokenizer, list(groups_of(tokens, places)), **options) == expected
        assert streamed(tokenizer, [[token] for token in tokens], **options) == expected


@given(text=TEXTS, style=st.sampled_from(STYLES), inside=st.booleans())
def test_a_tag_is_a_tag_as_a_token_of_its_own_too(text: str, style: str, inside: bool) -> None:
    if style == "plain":
        return
    if style not in FORMS:  # these tags are not looked for, so they are special tokens like any other, which are no text
        text = _untagged(text)
    if style not in ("tags", "bare_json", *FORMS):
        text = _untagged(text, ("<think>", "</think>"))
    results = [
        streamed(tokenizer, [tokenizer.encode(text, special=False)], style=style, starts_in_reasoning=inside)
        for tokenizer in (PLAIN_BYTES, TAGS_ARE_SPECIAL)
    ]
    assert results[0] == results[1]


def _untagged(text: str, tags: tuple[str, str] = ("<tool_call>", "</tool_call>")) -> str:
    """Until none is left: taking one out may make another."""
    while any(tag in text for tag in tags):
        text = text.replace(tags[0], "").replace(tags[1], "")
    return text


@given(text=TEXTS)
def test_plain_text_comes_out_as_it_is(text: str) -> None:
    for tokenizer in (PLAIN_BYTES, FALLBACK):
        tokens = tokenizer.encode(text, special=False)
        assert streamed(tokenizer, [[token] for token in tokens]).content == tokenizer.decode(tokens)
    assert streamed(PLAIN_BYTES, [PLAIN_BYTES.encode(text, special=False)]).content == text.replace(END, "")


@given(text=TEXTS, stop=STOPS)
def test_stops_never_leak(text: str, stop: list[str]) -> None:
    text = text.replace(END, "")
    found = streamed(PLAIN_BYTES, [[token] for token in PLAIN_BYTES.encode(text, special=False)], stop=stop)
    ends = [text.find(each) + len(each) for each in stop if each and each in text]
    assert found.stopped == bool(ends)
    assert not any(each in found.content for each in stop if each)
    if ends:
        assert text.startswith(found.content) and len(found.content) < min(ends)
    else:
        assert found.content == text


@given(text=TEXTS, stop=STOPS)
def test_no_more_is_held_back_than_may_become_a_stop(text: str, stop: list[str]) -> None:
    text = text.replace(END, "")
    stream, given_out = TextStream(PLAIN_BYTES, stop=stop), ""
    for end, letter in enumerate(text, start=1):
        piece = stream.push(PLAIN_BYTES.encode(letter, special=False))
        given_out += piece.content
        if piece.stopped:
            return
        held = text[len(given_out) : end]
        assert held == "" or any(each.startswith(held) and each != held for each in stop)


def test_after_a_stop_nothing_comes() -> None:
    stream = TextStream(PLAIN_BYTES, stop=["\n\n"])
    first = stream.push(PLAIN_BYTES.encode("one\n\ntwo", special=False))
    assert first == TextPiece(content="one", stopped=True)
    assert stream.push(PLAIN_BYTES.encode("three", special=False)) == stream.finish() == TextPiece(stopped=True)


def test_a_chat_with_reasoning_and_a_call() -> None:
    tools = [{"function": {"name": "sum", "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}}}]
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in (("a", 2), ("b", 3)))
    text = f"Let me add.\n</think>\nAdding:\n<tool_call>sum\n{pairs}</tool_call>"
    for tokenizer in (PLAIN_BYTES, TAGS_ARE_SPECIAL):
        tokens = [*tokenizer.encode(text, special=False), tokenizer.token_id(END) or 0]
        found = streamed(tokenizer, [[token] for token in tokens], style="arg_pairs", starts_in_reasoning=True, tools=tools)
        call = ToolCall(id="", name="sum", arguments='{"a": 2, "b": "3"}')
        assert found == TextPiece(content="Adding:", reasoning="Let me add.", tool_calls=(call,))


def test_the_output_ends_after_the_one_call_allowed() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    tokens = PLAIN_BYTES.encode(f"So: {call}{call} and more", special=False)
    for groups in ([tokens], [[token] for token in tokens]):
        found = streamed(PLAIN_BYTES, groups, style="json", one_call=True)
        assert found.content == "So:" and len(found.tool_calls) == 1 and found.stopped


@pytest.mark.parametrize(
    ("style", "inside", "text", "expected"),
    [
        ("tags", False, "<think>ab</think>c", len(">ab</think>")),
        ("tags", True, "ab</think>c", len("ab</think>")),
        ("tags", False, "no", 0),
        (
            "channels",
            False,
            "<|channel|>analysis<|message|>ab<|end|><|start|>assistant<|channel|>final<|message|>c",
            len(">ab") + 1,
        ),
        ("plain", False, "<think>ab</think>", 0),
    ],
)
def test_tokens_of_reasoning_are_counted(style: str, inside: bool, text: str, expected: int) -> None:
    stream = TextStream(PLAIN_BYTES, style=style, starts_in_reasoning=inside)
    stream.push(PLAIN_BYTES.encode(text, special=False))
    assert stream.num_reasoning_tokens == expected


def test_an_answer_that_has_begun_is_continued() -> None:
    """A tag is text there, and a channel's message needs no header."""
    for style in ("tags", "channels"):
        stream = TextStream(PLAIN_BYTES, style=style, begun=True)
        piece = stream.push(PLAIN_BYTES.encode("rest", special=False))
        assert (piece.content + stream.finish().content, piece.reasoning) == ("rest", "")


def test_calls_that_were_not_offered_are_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    tokens = PLAIN_BYTES.encode(text, special=False)
    assert streamed(PLAIN_BYTES, [tokens], style="json", tools=()).content == text
    assert streamed(PLAIN_BYTES, [tokens], style="json").tool_calls


def test_half_a_character_is_not_shown_and_not_lost() -> None:
    tokens = PLAIN_BYTES.encode("ab🚢", special=False)
    stream = TextStream(PLAIN_BYTES)
    assert [stream.push([token]).content for token in tokens[:-1]] == ["a", "b", "", "", ""]
    assert stream.finish().content == UNFINISHED


def test_what_follows_a_prompt_keeps_its_space() -> None:
    prompt, rest = FALLBACK.encode("b", special=False), FALLBACK.encode("a", special=False)
    assert TextStream(FALLBACK, prompt=prompt).push(rest).content == " a"
    assert TextStream(FALLBACK).push(rest).content == "a"


def test_an_unknown_style_is_one_clear_line() -> None:
    with pytest.raises(UnknownName, match="output style"):
        TextStream(PLAIN_BYTES, style="jsn")


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("abcST", ["STOP"], 2),
        ("abcSTOP", ["STOP"], 0),
        ("aSTOP", ["STOP", "STOPPED"], 4),
        ("aaa", ["aab"], 2),
        ("x", [], 0),
        ("", ["a"], 0),
    ],
)
def test_how_much_must_wait(text: str, words: list[str], expected: int) -> None:
    assert partial_match_length(text, words) == expected


def test_a_stop_lets_go_of_what_was_held() -> None:
    """A caller need not ask again: what waited for a tag comes with the stop."""
    stream = TextStream(PLAIN_BYTES, stop=["STOP"], style="json")
    assert stream.push(PLAIN_BYTES.encode("so: <tool_STOP", special=False)) == TextPiece(content="so: ", stopped=True)
    assert stream.finish() == TextPiece(stopped=True)


def test_half_a_character_before_a_tag_is_not_lost() -> None:
    half = TAGS_ARE_SPECIAL.encode("é", special=False)[:1]
    tokens = [*half, TAGS_ARE_SPECIAL.token_id("</think>") or 0, *TAGS_ARE_SPECIAL.encode("b", special=False)]
    found = streamed(TAGS_ARE_SPECIAL, [tokens], style="tags", starts_in_reasoning=True)
    assert (found.reasoning, found.content) == (UNFINISHED, "b")


def test_what_did_not_become_a_stop_comes_in_the_end() -> None:
    stream = TextStream(PLAIN_BYTES, stop=["STOP"])
    assert stream.push(PLAIN_BYTES.encode("a STO", special=False)).content == "a "
    assert stream.finish().content == "STO"
