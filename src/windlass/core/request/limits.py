"""Limits of the fields of a request, and how they are checked."""

from __future__ import annotations

import math
from collections.abc import Collection

from windlass.errors import BadInput

MAX_TOP_LOGPROBS = 128
MAX_STOP_STRINGS = 64
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
"""OpenAI's limits of logit_bias and of the presence and frequency penalties."""
MAX_TEMPERATURE = 100.0
REPETITION_PENALTIES = (0.01, 100.0)
"""Far beyond these, and beyond that temperature, logits overflow."""
PRIORITIES = (-4, 4)
MAX_INTEGER = 2**31 - 1
"""Of counts, positions and token ids: larger than any vocabulary or context."""


def check_number(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise BadInput(f"{name} is {value:g}; it should be between {low:g} and {high:g}", field=name.partition(" ")[0])


def check_integer(name: str, value: int | None, low: int, high: int = MAX_INTEGER) -> None:
    if value is not None and not low <= value <= high:
        raise BadInput(f"{name} is {shown_integer(value)}; it should be between {low:,} and {high:,}", field=name)


def check_tokens(name: str, tokens: Collection[int] | None) -> None:
    for token in (min(tokens), max(tokens)) if tokens else ():
        if not 0 <= token <= MAX_INTEGER:
            raise BadInput(f"{name} has token {shown_integer(token)}; token ids are between 0 and {MAX_INTEGER:,}", field=name)


def shown_integer(value: int) -> str:
    """Python refuses to print integers of thousands of digits."""
    return str(value) if abs(value) < 2**64 else "a number of more than 64 bits"
