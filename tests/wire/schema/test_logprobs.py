"""Log-probabilities in both forms, and where tokens begin in the text."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_values import logprobs

from windlass.core.request import TokenLogprob
from windlass.wire.schema.chat import ChatLogprob, ChatLogprobs
from windlass.wire.schema.completions import CompletionLogprobs
from windlass.wire.schema.logprobs import (
    LOWEST,
    NO_ID,
    Offsets,
    chat_logprobs,
    completion_logprobs,
    read_chat_logprobs,
    read_completion_logprobs,
)

pytestmark = pytest.mark.pure

PIECE = "\ufffd"


def offsets(tokens: list[str], text: str, start: int = 0) -> list[int]:
    place = Offsets(start)
    return [place.next(token, text) for token in tokens]


@given(st.lists(st.text(max_size=4)))
def test_offsets_of_tokens_that_are_the_text(tokens: list[str]) -> None:
    tokens = [token.replace(PIECE, "") for token in tokens]
    text = "".join(tokens)
    assert [text[begin : begin + len(token)] for begin, token in zip(offsets(tokens, text), tokens, strict=True)] == tokens
    assert offsets(tokens, text) == [len("".join(tokens[:number])) for number in range(len(tokens))]


@pytest.mark.parametrize(
    ("tokens", "text", "expected"),
    [
        ([PIECE, PIECE, "!"], "é!", [0, 0, 1]),  # a character in two tokens
        (["a", PIECE, PIECE, PIECE, PIECE, "b", "c"], "a😀bc", [0, 1, 1, 1, 1, 2, 3]),
        ([PIECE, PIECE, PIECE, PIECE, "x"], "éüx", [0, 0, 0, 0, 2]),
        ([f"a{PIECE}", PIECE, "b"], "aéb", [0, 0, 2]),
        (["<s>", "Hi"], "Hi", [0, 0]),  # a special token is no part of the text
        (["Hi", "</s>"], "Hi", [0, 2]),
        (["Hi", "", " you"], "Hi you", [0, 2, 2]),
        (["He", "llo"], "He", [0, 2]),  # tokens run ahead of the text
        ([PIECE, PIECE], "", [0, 0]),
        (["Hi", "you", "!"], "Hi you!", [0, 2, 6]),  # as tokenizers write tokens that begin with a space, one by one
    ],
)
def test_offsets(tokens: list[str], text: str, expected: list[int]) -> None:
    assert offsets(tokens, text) == expected


def test_offsets_behind_an_echoed_prompt() -> None:
    assert offsets(["c", "d"], "abcd", start=2) == [2, 3]


@given(st.lists(logprobs))
def test_chats_there_and_back_with_ids(entries: list[TokenLogprob]) -> None:
    body = msgspec.json.decode(msgspec.json.encode(chat_logprobs(entries, with_ids=True)), type=type(chat_logprobs([])))
    assert list(read_chat_logprobs(body)) == entries


def test_chats_without_ids_say_that_they_have_none() -> None:
    entry = TokenLogprob(token_id=5, logprob=-1.0, token="é", top=(TokenLogprob(token_id=6, logprob=-0.5, token=PIECE),))
    body = chat_logprobs([entry])
    assert msgspec.to_builtins(body) == {
        "content": [
            {
                "token": "é",
                "logprob": -1.0,
                "bytes": [195, 169],
                "top_logprobs": [{"token": PIECE, "logprob": -0.5, "bytes": None}],
            }
        ],
        "refusal": None,
    }
    assert read_chat_logprobs(body)[0].token_id == NO_ID
    assert read_chat_logprobs(body, [5])[0].token_id == 5


def test_a_piece_of_a_character_has_its_bytes() -> None:
    entry = TokenLogprob(
        token_id=5, logprob=-1.0, token=PIECE, raw=b"\xc3", top=(TokenLogprob(token_id=6, logprob=-0.5, token="e"),)
    )
    body = chat_logprobs([entry], with_ids=True)
    assert body.content is not None
    assert (body.content[0].bytes, body.content[0].top_logprobs[0].bytes) == ([0xC3], [0x65])
    assert read_chat_logprobs(body) == (entry,)


def test_bytes_that_are_none_are_passed_over() -> None:
    body = ChatLogprobs(content=[ChatLogprob(token=PIECE, logprob=-1.0, bytes=[300])])
    assert read_chat_logprobs(body)[0].raw == b""


def test_what_json_cannot_say_is_said_as_very_unlikely() -> None:
    never = TokenLogprob(token_id=1, logprob=-math.inf, token="x")
    assert chat_logprobs([never]).content[0].logprob == LOWEST  # type: ignore[index]
    assert completion_logprobs([never], Offsets(), "x").token_logprobs == [LOWEST]


def test_the_four_lists() -> None:
    top = (TokenLogprob(token_id=1, logprob=-0.1, token=" b"), TokenLogprob(token_id=2, logprob=-3.0, token=" c"))
    entries = [None, TokenLogprob(token_id=9, logprob=-5.0, token=" d", top=top)]
    assert completion_logprobs(entries, Offsets(), "a d", first="a") == CompletionLogprobs(
        tokens=["a", " d"],
        token_logprobs=[None, -5.0],
        top_logprobs=[None, {" b": -0.1, " c": -3.0, " d": -5.0}],  # the token itself is one of them
        text_offset=[0, 1],
    )


def test_of_tokens_with_the_same_text_the_likeliest_counts() -> None:
    top = tuple(TokenLogprob(token_id=number, logprob=-float(number), token=PIECE) for number in (1, 2, 3))
    found = completion_logprobs([TokenLogprob(token_id=3, logprob=-3.0, token=PIECE, top=top)], Offsets(), "")
    assert found.top_logprobs == [{PIECE: -1.0}]


def test_reading_the_four_lists() -> None:
    body = CompletionLogprobs(tokens=["a", "b"], token_logprobs=[None, -2.0], top_logprobs=[None, {"b": -2.0, "c": -1.0}])
    first, second = read_completion_logprobs(body, [7, 8])
    assert first is None
    assert second is not None
    assert (second.token_id, second.logprob, [(one.token, one.token_id) for one in second.top]) == (
        8,
        -2.0,
        [("c", NO_ID), ("b", 8)],
    )
    without_top = CompletionLogprobs(tokens=["a"], token_logprobs=[-1.0])
    assert read_completion_logprobs(without_top) == (TokenLogprob(token_id=NO_ID, logprob=-1.0, token="a"),)
    assert read_completion_logprobs(None) == ()
