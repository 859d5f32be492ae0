"""A request inside the engine: its tokens, how many of them are computed, and its blocks. Changed by the scheduler only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Sequence:
    """tokens:   [ prompt .............. | output ......... ]
                 [ computed .................... | to do ... ]
    blocks:     one for every `block_tokens` computed (or about to be); the first `num_kept` are findable by others.
    """

    id: int
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    """Of the output."""
    stop_token_ids: frozenset[int] = frozenset()
    salt: str = ""
    owner: str = ""
    """Whose it is: owners share the engine."""
    scored_from: int | None = None
    """The first prompt token whose log-probability is wanted; None: none is."""
    request: Any = None
    """What the sampler needs to know; the scheduler does not look at it."""

    arrival: int = 0
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list[int])
    num_kept: int = 0
    chain: int | str = ""
    """Stands for the tokens of the kept blocks."""
    num_cached: int = -1
    """Prompt tokens found in the cache when it was first admitted; -1: not yet admitted."""
    num_scored: int = 0
    """Prompt tokens whose log-probabilities are known (or not wanted); a preempted sequence does not ask for them again."""
    num_preemptions: int = 0

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens still to be computed: 1 while decoding, more in prefill."""
        return len(self.tokens) - self.num_computed

    @property
    def longest(self) -> int:
        """Tokens it can grow to. The last one is never computed: nobody asks what follows it."""
        return self.num_prompt + self.max_tokens
