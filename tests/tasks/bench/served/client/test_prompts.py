"""Prompts: of exactly the length, never with a common start; words that make a number of tokens."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.tasks.bench.served.client.prompts import (
    ANY_VOCABULARY,
    WORDS,
    TextPrompts,
    TokenPrompts,
    digits,
    sample_text,
    vocabulary_of,
    words_for,
)

pytestmark = pytest.mark.pure


@given(st.integers(0, 2**90), st.integers(2, 5000))
def test_digits(value: int, radix: int) -> None:
    found = digits(value, radix)
    assert sum(digit * radix**place for place, digit in enumerate(found)) == value and all(0 <= one < radix for one in found)


@given(st.integers(1, 300), st.integers(2, 3000), st.integers(0, 2**48), st.integers(0, 100))
def test_prompts_have_their_length_and_are_reproducible(tokens: int, size: int, salt: int, number: int) -> None:
    prompts = TokenPrompts(vocabulary=tuple(range(1000, 1000 + size)), seed="s", salt=salt)
    found = prompts.prompt(number, tokens)
    assert (
        len(found) == tokens and all(1000 <= token < 1000 + size for token in found) and found == prompts.prompt(number, tokens)
    )


def common_start(one: list[int], other: list[int]) -> int:
    return next((place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))


def test_no_prompts_begin_alike() -> None:
    """Neither those of a run nor the same ones of the next; a cache's block is 16 tokens or more."""
    runs = [TokenPrompts(seed="0", salt=salt) for salt in (2**40 + 1, 2**41 + 7, 12345)]
    made = [prompts.prompt(number, 64) for prompts in runs for number in range(100)]
    ordered = sorted(made)
    assert max(common_start(one, other) for one, other in pairwise(ordered)) < 8
    assert len({tuple(prompt[:1]) for prompt in made[:100]}) == 100, "requests in a row differ in their first token"


def test_text() -> None:
    prompts = TextPrompts(words={20: 14}, seed="0", salt=99)
    assert len(prompts.prompt(0, 20).split()) == 14 and len(prompts.prompt(0, 9).split()) == 9
    assert prompts.prompt(0, 20).split()[0] != prompts.prompt(1, 20).split()[0] and len(set(WORDS)) == len(WORDS)


@given(st.integers(1, 4000), st.integers(0, 60), st.integers(1, 3))
def test_words_are_found_for_any_template(tokens: int, added: int, per_word: int) -> None:
    """`added` by a chat template; the nearest that words allow."""
    asked: list[int] = []

    async def count(words: int) -> int:
        asked.append(words)
        return added + per_word * words

    found = added + per_word * asyncio.run(words_for(tokens, count))
    least = added + per_word
    assert abs(found - tokens) <= max(per_word - 1, least - tokens) and len(asked) <= 6 and min(asked) >= 1


def test_where_the_server_does_not_count_words_are_tokens() -> None:
    async def silent(_: int) -> int:
        return 0

    assert asyncio.run(words_for(77, silent)) == 77


def test_vocabulary() -> None:
    assert vocabulary_of([1, *range(500, 800), 2]) == tuple(range(500, 800)), "without what begins and ends every text"
    assert vocabulary_of([1, 5, 6, 2]) == ANY_VOCABULARY == vocabulary_of([])
    assert sample_text() == sample_text() and len(set(sample_text().split())) > 2000
