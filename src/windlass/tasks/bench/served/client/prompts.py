"""Prompts that share no prefix, neither with each other nor with those of an earlier run, so that no prefix cache has them. Pure."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from windlass.core.model import Frozen

ANY_VOCABULARY = tuple(range(300, 1000))
"""Tokens of every vocabulary, none of them special, for servers that do not tokenize."""
WORDS = tuple(
    "the of and to in is that it he was for on are as with his they at be this from have or by one had not but what all were "
    "when we there can an your which their said if do will each about how up out them then she many some so these would other "
    "into has more her two like him see time could no make than first been its who now people my made over did down only way "
    "find use may water long little very after words called just where most know".split()
)
"""One token each in nearly every vocabulary."""
NUMBER_BITS = 32
MAX_TRIES = 6


class Prompts(Protocol):
    def prompt(self, number: int, tokens: int) -> list[int] | str: ...


def digits(value: int, radix: int) -> list[int]:
    """Least significant first."""
    found: list[int] = []
    while value:
        value, digit = divmod(value, radix)
        found.append(digit)
    return found


def drawn(number: int, count: int, radix: int, seed: str, salt: int) -> list[int]:
    """`count` numbers below `radix`: first the request's number, then the run's salt, then what the seed gives."""
    start = digits((salt << NUMBER_BITS) + number, radix)[:count]
    chance = random.Random(f"{seed}/{number}")
    words = memoryview(chance.randbytes(4 * (count - len(start)))).cast("I")
    return start + [word % radix for word in words]


class TokenPrompts(Frozen):
    """As token ids: exactly as many as asked for."""

    vocabulary: tuple[int, ...] = ANY_VOCABULARY
    seed: str = ""
    salt: int = 0
    """Another one for every run and server."""

    def prompt(self, number: int, tokens: int) -> list[int]:
        vocabulary = self.vocabulary
        return [vocabulary[place] for place in drawn(number, tokens, len(vocabulary), self.seed, self.salt)]


class TextPrompts(Frozen):
    """As text, for servers that take no token ids; `words`: how many words make a prompt of so many tokens."""

    words: dict[int, int]
    seed: str = ""
    salt: int = 0

    def prompt(self, number: int, tokens: int) -> str:
        count = self.words.get(tokens, tokens)
        return " ".join(WORDS[place] for place in drawn(number, count, len(WORDS), self.seed, self.salt))


async def words_for(tokens: int, count: Callable[[int], Awaitable[int]]) -> int:
    """How many words the server counts as so many tokens, with what its template adds; the nearest if none fits.

    `count`: the server's own count for a prompt of so many words; 0: it does not say.
    """
    words, counts = tokens, dict[int, int]()
    for _ in range(MAX_TRIES):
        counts[words] = found = await count(words)
        if not found:
            return tokens
        words = _nearer(counts, words, tokens)
        if words in counts:
            break
    return min(counts, key=lambda tried: abs(counts[tried] - tokens))


def _nearer(counts: Mapping[int, int], words: int, tokens: int) -> int:
    """Words are about a token each until two counts say otherwise."""
    found = counts[words]
    other = next((tried for tried in counts if tried != words), None)
    slope = 1.0 if other is None else (found - counts[other]) / (words - other)
    return max(words + round((tokens - found) / max(slope, 0.25)), 1)


def sample_text(seed: int = 0, words: int = 3000) -> str:
    """To learn ordinary tokens of a vocabulary from: words of any letters, and common ones."""
    chance = random.Random(seed)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    made = ("".join(chance.choices(letters, k=chance.randint(1, 6))) for _ in range(words))
    return " ".join([*WORDS, *made])


def vocabulary_of(tokens: Sequence[int]) -> tuple[int, ...]:
    """Distinct ones of a tokenized text, without what may be special at its ends; too few: those that every vocabulary has."""
    found = tuple(sorted(set(tokens[1:-1]) - {*tokens[:1], *tokens[-1:]}))
    return found if len(found) >= len(WORDS) else ANY_VOCABULARY
