"""Training FLOPs per token and model FLOPs utilization, counted as in plans. Pure.

6 (active parameters - embeddings) + 6 layers heads head_dim s: causal attention counted once, recomputation not counted.
"""

from __future__ import annotations

from windlass.core.count import forward_flops, next_token_flops, training_flops
from windlass.core.model import ModelSpec
from windlass.core.rule import Rule


def flops_per_token(spec: ModelSpec, rules: tuple[Rule, ...], sequence_tokens: int, *, next_token: bool = False) -> float:
    seen = sequence_tokens / 2
    forward = training_flops(forward_flops(spec, rules, seen), "none").model
    return forward + (3 * next_token_flops(spec, rules, seen).total if next_token else 0.0)


def utilization(flops_per_token: float, tokens_per_second: float, peak_flops: float, num_devices: int = 1) -> float:
    return flops_per_token * tokens_per_second / (peak_flops * num_devices)
