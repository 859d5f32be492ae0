"""Bytes and FLOPs of a step. Pure arithmetic over a ModelSpec and the measured weight bytes."""

from __future__ import annotations

from windlass.core.count import distinct_experts, forward_flops
from windlass.core.model import Frozen, ModelSpec, layer_cache_bytes
from windlass.core.rule import Rule
from windlass.core.scheme import KV_BYTES, KV_VECTOR_BYTES


class WeightBytes(Frozen):
    """Memory of the loaded weights."""

    always: int
    """Read in every step, including the head."""
    experts: int = 0
    """All routed experts; a step reads the selected ones."""
    lookup: int = 0
    """Untied embeddings, of which a step reads one row per token."""

    @property
    def total(self) -> int:
        return self.always + self.experts + self.lookup


class StepWork(Frozen):
    weight_bytes: float
    kv_bytes: float
    flops: float

    @property
    def read_bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes


def expert_share(spec: ModelSpec, tokens: float) -> float:
    """Expected share of experts used by `tokens` tokens with uniform routing."""
    experts = spec.experts
    return distinct_experts(experts, tokens) / experts.num_experts if experts else 0.0


def decode_work(
    spec: ModelSpec, rules: tuple[Rule, ...], weights: WeightBytes, batch: int, context_tokens: float, kv: str
) -> StepWork:
    """One decode step of `batch` sequences with `context_tokens` cached tokens each, in a cache of that type."""
    layers = (
        layer_cache_bytes(
            layer.mixer, round(context_tokens), KV_BYTES[kv], windowed=True, vector_bytes=KV_VECTOR_BYTES.get(kv, 0)
        )
        for layer in spec.layers
    )
    return StepWork(
        weight_bytes=weights.always + weights.experts * expert_share(spec, batch),
        kv_bytes=batch * sum(layers),
        flops=batch * forward_flops(spec, rules, context_tokens).total,
    )


def prefill_work(
    spec: ModelSpec, rules: tuple[Rule, ...], weights: WeightBytes, prompts: int, prompt_tokens: int, num_steps: int
) -> StepWork:
    """Prefill of `prompts` prompts in `num_steps` steps; each step reads the weights once, only last tokens need the head."""
    tokens = prompts * prompt_tokens
    operations = forward_flops(spec, rules, prompt_tokens / 2)
    share = expert_share(spec, tokens / num_steps)
    return StepWork(
        weight_bytes=num_steps * (weights.always + weights.experts * share),
        kv_bytes=0.0,
        flops=tokens * (operations.layers + operations.attention) + prompts * operations.head,
    )
