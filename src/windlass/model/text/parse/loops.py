"""Recognises an answer that repeats itself without end: the same few tokens over and over. Pure.

Small or heavily quantized models fall into such loops, above all when decoding greedily (Holtzman et al., arXiv 1904.09751). Only
exact repetition counts, and only much of it: tables, digits of zero and refrains of a song repeat, too.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_PERIOD = 128
"""Tokens that are repeated."""
LEAST_TOKENS = 96
"""Tokens that repetitions must cover."""
LEAST_TIMES = 4


class LoopDetector:
    """Told the tokens of one answer as they come. Asking costs a comparison of the last tokens, so it is done now and then."""

    EVERY = 16

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._unchecked = 0

    def add(self, token_ids: Sequence[int]) -> int:
        """The period of the loop that the answer has fallen into; 0: none."""
        self._tokens.extend(token_ids)
        self._unchecked += len(token_ids)
        if self._unchecked < self.EVERY:
            return 0
        self._unchecked = 0
        del self._tokens[: -LONGEST_PERIOD * LEAST_TIMES]
        return loop_period(self._tokens)


def loop_period(tokens: Sequence[int]) -> int:
    """The smallest number of tokens that the end of the sequence repeats often enough; 0: it does not."""
    for period in range(1, LONGEST_PERIOD + 1):
        covered = max(LEAST_TOKENS, LEAST_TIMES * period)
        if covered > len(tokens):
            return 0
        tail = tokens[len(tokens) - covered :]
        if tail[period:] == tail[:-period]:
            return period
    return 0
