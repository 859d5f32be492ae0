"""Sampling parameters."""

from __future__ import annotations

from windlass.core.model import Frozen
from windlass.core.request.limits import (
    MAX_BIAS,
    MAX_PENALTY,
    MAX_TEMPERATURE,
    REPETITION_PENALTIES,
    check_integer,
    check_number,
    check_tokens,
)
from windlass.errors import BadInput

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow."""


class Sampling(Frozen):
    """Sampling parameters, applied in this order: bias, penalties, temperature, min-p, top-k, top-p."""

    temperature: float = 1.0
    """0 is greedy (the lowest id of equally likely tokens)."""
    top_k: int | None = None
    """Sample from the k most likely tokens; None: from all."""
    top_p: float = 1.0
    """Sample from the most likely tokens up to this total probability."""
    min_p: float = 0.0
    """Minimum probability, relative to the most likely token."""
    repetition_penalty: float = 1.0
    """Logits of tokens in prompt or output: divided by it where positive, multiplied where negative (arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence of the token in the output."""
    logit_bias: dict[int, float] = {}
    """Token id -> value added to its logit."""
    seed: int | None = None
    """The same seed gives the same tokens, whatever else is in the batch. None: random per request."""

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        check_integer("top_k", self.top_k, 1)
        if not 0.0 < self.top_p <= 1.0:
            raise BadInput(f"top_p is {self.top_p:g}; it should be more than 0 and at most 1", field="top_p")
        check_number("min_p", self.min_p, 0.0, 1.0)
        check_number("repetition_penalty", self.repetition_penalty, *REPETITION_PENALTIES)
        check_number("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        check_number("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        check_tokens("logit_bias", self.logit_bias)
        for token, bias in self.logit_bias.items():
            check_number(f"logit_bias of token {token}", bias, -MAX_BIAS, MAX_BIAS)
        check_integer("seed", self.seed, -(2**63), 2**64 - 1)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


GREEDY = Sampling(temperature=0.0)
