"""Drafts by n-gram lookup: what followed the last tokens where they occurred before, in the prompt or the answer (arXiv 2304.04487;
prompt lookup decoding). Pure, no torch.

`lookup` is the definition; `NgramIndex` gives the same answers without a scan, for tokens that only grow.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST, SHORTEST = 5, 2
"""Lengths of n-grams that are looked for, longest first. One token alone is followed by the same one too rarely."""


def lookup(tokens: Sequence[int], count: int) -> tuple[int, ...]:
    """Up to `count` tokens that followed the latest earlier occurrence of the longest suffix that has one."""
    for length in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
        suffix = tuple(tokens[-length:])
        for end in range(len(tokens) - 1, length - 1, -1):
            if tuple(tokens[end - length : end]) == suffix:
                return continued(tokens, end, count)
    return ()


def continued(tokens: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """Tokens from `start` on; where they run out, what was drafted goes on (a loop repeats itself)."""
    period = len(tokens) - start
    return tuple(tokens[start + place % period] for place in range(count))


class NgramIndex:
    """Where each n-gram of a growing list of tokens ended last."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._num_tokens = 0

    def draft(self, tokens: Sequence[int], count: int) -> tuple[int, ...]:
        """The same as `lookup`. `tokens` begin with those of the last call."""
        self._add(tokens)
        for length in range(min(LONGEST, len(tokens) - 1), SHORTEST - 1, -1):
            end = self._ends.get(tuple(tokens[-length:]))
            if end is not None:
                return continued(tokens, end, count)
        return ()

    def _add(self, tokens: Sequence[int]) -> None:
        """Those that end before the last token: the suffix itself is not an earlier occurrence."""
        ends = self._ends
        for end in range(self._num_tokens, len(tokens)):
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                ends[tuple(tokens[end - length : end])] = end
        self._num_tokens = len(tokens)
