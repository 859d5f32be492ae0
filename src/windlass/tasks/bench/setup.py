"""What to benchmark. Imports no torch, so that invalid options fail at once."""

from __future__ import annotations

from windlass.core.launch import Launch
from windlass.core.model import Frozen, ModelSpec
from windlass.core.rule import Rule
from windlass.core.scheme import Scheme


class BenchSetup(Frozen):
    name: str
    spec: ModelSpec
    rules: tuple[Rule, ...]
    launch: Launch
    scheme: Scheme | None = None
    """Scheme of the weights, if it is one of ours."""
    batches: tuple[int, ...] = (1,)
    prompt_tokens: int = 128
    new_tokens: int = 128

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.new_tokens
