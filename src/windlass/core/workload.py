"""The workload to plan for: context, concurrency, prompt and answer length, and the goal."""

from __future__ import annotations

from windlass.core.model import Frozen

GOALS = ("latency", "throughput", "cost")


class Workload(Frozen):
    context_tokens: int
    """Maximum tokens per sequence."""
    concurrency: int
    prompt_tokens: int
    new_tokens: int
    goal: str = "latency"
    reserve_tokens: int = 0
    """KV cache reserved per sequence: the whole context if the concurrency was given, the mean length if it is as many as fit."""

    waiting: int = 0
    """Requests that wait because memory holds no more at once."""
    requests: int = 0
    """A burst of so many, all at once; 0: a steady stream."""
    spread: bool = False
    """The burst's answers differ in length as those of a chat log do."""
    draft_tokens: int = 0
    """Tokens that are drafted per step (MTP, or a draft model of that cost)."""
    acceptance: float = 0.0
    """Chance that a draft is accepted, given that those before it were."""
    cached_prefix: float = 0.0
    """Fraction of a prompt that is in the prefix cache."""

    @property
    def tokens_per_step(self) -> float:
        """Output tokens of one sequence per step: 1 + a + a^2 ... over the drafts."""
        return sum(self.acceptance**index for index in range(self.draft_tokens + 1))

    @property
    def computed_prompt_tokens(self) -> int:
        return max(round(self.prompt_tokens * (1 - self.cached_prefix)), 1)

    @property
    def mean_decode_context(self) -> float:
        """Tokens in the KV cache halfway through an answer."""
        return self.prompt_tokens + self.new_tokens / 2


def workload(
    context_tokens: int, concurrency: int, goal: str = "latency", prompt_tokens: int | None = None, new_tokens: int | None = None
) -> Workload:
    """Prompt and answer default to 1k + 1k (as in published serving benchmarks), or half the context each if that is less."""
    half = max(context_tokens // 2, 1)
    if prompt_tokens is not None and new_tokens is None:
        new_tokens = max(min(1024, context_tokens - prompt_tokens), 1)
    if new_tokens is not None and prompt_tokens is None:
        prompt_tokens = max(min(1024, context_tokens - new_tokens), 1)
    return Workload(
        context_tokens=context_tokens,
        concurrency=concurrency,
        prompt_tokens=prompt_tokens or min(1024, half),
        new_tokens=new_tokens or min(1024, half),
        goal=goal,
        reserve_tokens=context_tokens,
    )
