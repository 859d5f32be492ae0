"""What a router has done since its start, for /metrics and the log. Numbers only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    requests: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    """By model that answered and how it was chosen."""
    decisions: Counter[str] = field(default_factory=Counter[str])
    """By the model that was chosen, of requests that left it to the router."""
    failures: Counter[str] = field(default_factory=Counter[str])
    """Attempts that failed, by model."""
    fallbacks: int = 0
    """Requests that another model answered than the one chosen, because that one failed."""
    passed_on: int = 0
    """Answers of the first model that were not kept."""
    abstained: int = 0
    lost: int = 0
    """Requests that no model answered."""
    resumed: int = 0
    """Answers that another model continued in the middle."""
    cost: float = 0.0
    grams: float = 0.0
    prompt_tokens: int = 0
    answer_tokens: int = 0
