"""What is to be measured. Imports no torch, so that a mistake is answered at once."""

from __future__ import annotations

from windlass.core.launch import Launch
from windlass.core.model import Frozen, ModelSpec
from windlass.core.rule import Rule
from windlass.core.scheme import Scheme


class Setup(Frozen):
    name: str
    spec: ModelSpec
    rules: tuple[Rule, ...]
    launch: Launch
    scheme: Scheme | None = None
    """How matrices are stored, where it is one of our schemes."""
    batches: tuple[int, ...] = (1,)
    prompt_tokens: int = 128
    new_tokens: int = 128

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.new_tokens
