"""What to benchmark. Imports no torch, so that invalid options fail at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from windlass.core.model import Frozen, ModelSpec
from windlass.core.rule import Rule
from windlass.core.scheme import Scheme


class BenchSetup(Frozen):
    name: str
    spec: ModelSpec
    rules: tuple[Rule, ...]
    path: Path | None = None
    """None: random weights."""
    config: dict[str, Any] = {}
    """config.json of the model, for random weights."""
    scheme: Scheme | None = None
    """Scheme of the weights, if it is one of ours."""
    batches: tuple[int, ...] = (1,)
    prompt_tokens: int = 128
    new_tokens: int = 128
    device: str = "auto"
    kv: str = "bf16"
    exact: bool = False

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.new_tokens
