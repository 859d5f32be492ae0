"""Reasoning apart from answers, whatever the pieces in which text arrives."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.model.text.parse.reasoning import CLOSE, OPEN, ReasoningSplitter, opens_reasoning
from windlass.model.text.parse.stop_filter import SPACE

pytestmark = pytest.mark.pure

FRAGMENTS = st.sampled_from([OPEN, CLOSE, "<think", "</thi", "<", "a", "bc ", " \n", "\n\n", "é", "🚢"])
TEXTS = st.lists(FRAGMENTS, max_size=12).map("".join)


def split(pieces: list[str], starts_in_reasoning: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(starts_in_reasoning)
    parts = [*(splitter.push(piece) for piece in pieces), splitter.finish()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[begin:end] for begin, end in pairwise(edges)]


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "answer"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, "Hm.", "Yes."),
        ("\n<think>Hm.</think>Yes.", False, "Hm.", "Yes."),
        ("Hm.\n</think>\nYes.\n", True, "Hm.", "Yes.\n"),
        ("<think>Hm.</think>Yes.", True, "Hm.", "Yes."),
        ("<think></think>Yes.", False, "", "Yes."),
        ("Yes, <think> is a tag.", False, "", "Yes, <think> is a tag."),
        ("<think>a</think>b <think>c</think>", False, "a", "b <think>c</think>"),
        ("No end", True, "No end", ""),
        ("<think>No end</thi", False, "No end</thi", ""),
        ("  plain\n", False, "", "  plain\n"),
        ("<thinking>", False, "", "<thinking>"),
        ("", True, "", ""),
    ],
)
def test_what_goes_where(text: str, inside: bool, reasoning: str, answer: str) -> None:
    assert split([text], inside) == (reasoning, answer)
    assert split(list(text), inside) == (reasoning, answer)


@given(text=TEXTS, places=st.lists(st.integers(0, 99), max_size=6), inside=st.booleans())
def test_pieces_do_not_matter(text: str, places: list[int], inside: bool) -> None:
    assert split(cut(text, places), inside) == split([text], inside)


@given(text=TEXTS, inside=st.booleans())
def test_against_a_regular_expression(text: str, inside: bool) -> None:
    space = f"[{SPACE}]*"
    found = re.match(f"{space}{OPEN}", text)
    rest = text[found.end() :] if found else text
    if found is None and not inside:
        assert split([text], inside) == ("", text)
        return
    thought, close, answer = rest.partition(CLOSE)
    if close:
        assert split([text], inside) == (thought.strip(SPACE), answer.lstrip(SPACE))
    else:
        assert split([text], inside) == (rest.lstrip(SPACE), "")


@given(text=TEXTS)
def test_only_what_may_be_a_tag_waits(text: str) -> None:
    """A reader sees each word as it comes: no more is held than the beginning of a tag and the space before it."""
    splitter = ReasoningSplitter(True)
    given_out = "".join("".join(splitter.push(letter)) for letter in f"word{text}")
    tail = splitter.finish()
    assert len("".join(tail).strip(SPACE)) < len(CLOSE)
    assert given_out.startswith("word")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|assistant|><think>", True),
        ("assistant\n<think>\n", True),
        ("\n<think></think>", False),
        ("</think>", False),
        ("", False),
    ],
)
def test_prompts_that_open_reasoning(prompt: str, expected: bool) -> None:
    assert opens_reasoning(prompt) is expected
