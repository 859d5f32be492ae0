"""What a step has to do: bytes to read, operations to carry out. Pure arithmetic over a ModelSpec; the weights' bytes come measured."""

from __future__ import annotations

from windlass.core.count import distinct_experts, forward_flops
from windlass.core.model import Frozen, ModelSpec, layer_cache_bytes
from windlass.core.rule import Rule


class WeightBytes(Frozen):
    """As they lie in memory."""

    always: int
    """Read in every step, the head among them."""
    experts: int = 0
    """All routed experts; a step reads those its tokens chose."""
    lookup: int = 0
    """An embedding of its own, of which a step reads a row a token."""

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
    """Of the experts, how many that many tokens touch when choices are even."""
    experts = spec.experts
    return distinct_experts(experts, tokens) / experts.num_experts if experts else 0.0


def decode_work(
    spec: ModelSpec, rules: tuple[Rule, ...], weights: WeightBytes, batch: int, context_tokens: float, kv_element_bytes: float
) -> StepWork:
    """One step of `batch` sequences, each with `context_tokens` tokens in the cache."""
    layers = (layer_cache_bytes(layer.mixer, round(context_tokens), kv_element_bytes, windowed=True) for layer in spec.layers)
    return StepWork(
        weight_bytes=weights.always + weights.experts * expert_share(spec, batch),
        kv_bytes=batch * sum(layers),
        flops=batch * forward_flops(spec, rules, context_tokens).total,
    )


def prefill_work(
    spec: ModelSpec, rules: tuple[Rule, ...], weights: WeightBytes, prompts: int, prompt_tokens: int, num_steps: int
) -> StepWork:
    """Reading `prompts` prompts in `num_steps` steps: each goes through the weights once; only last tokens need the head."""
    tokens = prompts * prompt_tokens
    operations = forward_flops(spec, rules, prompt_tokens / 2)
    share = expert_share(spec, tokens / num_steps)
    return StepWork(
        weight_bytes=num_steps * (weights.always + weights.experts * share),
        kv_bytes=0.0,
        flops=tokens * (operations.layers + operations.attention) + prompts * operations.head,
    )
