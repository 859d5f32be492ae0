"""One problem and its answer. Knows no task."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple


class Problem(NamedTuple):
    task: str
    key: str
    """The problem independent of its wording: problems with the same key are in the same split."""
    prompt: str
    answer: str


Maker = Callable[[Random], Problem]


def draw_digits(random: Random, most: int = 3) -> int:
    """A number of one to `most` digits; longer ones more often, since there are more of them."""
    digits = random.choices(range(1, most + 1), weights=range(1, most + 1))[0]
    return random.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
