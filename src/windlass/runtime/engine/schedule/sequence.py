"""A request inside the engine: its tokens, how many of them are computed, and its KV blocks. Changed by the scheduler only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, eq=False)
class Sequence:
    """tokens:   [ prompt .............. | output ......... ]
                 [ computed .................... | pending . ]
    blocks:     one for every `block_tokens` computed (or about to be); the first `num_registered` are in the prefix cache.
    """

    id: int
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    """Of the output."""
    stop_token_ids: frozenset[int] = frozenset()
    salt: str = ""
    owner: str = ""
    """For fair scheduling between owners: GROUP/USER."""
    priority: int = 0
    """Lower is more urgent (queue.py)."""
    adapter: str = ""
    """The LoRA adapter that its rows are computed with; empty: none."""
    scored_from: int | None = None
    """The first prompt token whose log-probability is requested; None: none."""
    request: Any = None
    """The engine's RequestState; opaque to the scheduler."""

    arrival: int = 0
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list[int])
    num_registered: int = 0
    chain: int | str = ""
    """Prefix-cache chain of the registered blocks (blocks.py)."""
    num_cached: int = -1
    """Prompt tokens found in the prefix cache at first admission; -1: not yet admitted."""
    num_scored: int = 0
    """Prompt tokens whose log-probabilities are known or not requested; kept across preemption."""
    num_preemptions: int = 0
    num_yields: int = 0
    """Preemptions for more urgent sequences."""
    drafts: tuple[int, ...] = ()
    """Guesses of the tokens that follow, for the next step to verify; it uses as many as it has room for, and drops the rest."""

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_pending(self) -> int:
        """Tokens still to be computed: 1 while decoding, more in prefill."""
        return len(self.tokens) - self.num_computed

    @property
    def longest(self) -> int:
        """Tokens it can grow to. The last one is never computed: nothing follows it."""
        return self.num_prompt + self.max_tokens
