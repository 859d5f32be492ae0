"""Parameter and FLOP counts, from the rules. Knows no hardware."""

from __future__ import annotations

from collections.abc import Iterable

from windlass.core.model import Attention, Frozen, LatentAttention, Mixer, ModelSpec, MoE
from windlass.core.rule import ModelPart, Role, Rule


class ParameterCount(Frozen):
    total: int
    """Without the MTP layer and stored duplicates."""
    checkpoint: int
    """Every parameter in the published files."""
    active: int
    """Used per token. MoE models: without the input embedding, of which a token reads one row; dense models: all, as is the convention."""
    embedding: int


def _numbers(rules: Iterable[Rule]) -> int:
    return sum(rule.elements * rule.copies for rule in rules)


def count_parameters(spec: ModelSpec, rules: tuple[Rule, ...]) -> ParameterCount:
    main = [rule for rule in rules if rule.part is ModelPart.MAIN and rule.copy_of is None]
    total = _numbers(main)
    lookups = _numbers(rule for rule in main if rule.role is Role.LOOKUP)
    idle = sum(
        rule.elements * rule.copies // rule.num_experts * (rule.num_experts - rule.num_active)
        for rule in main
        if rule.num_experts
    )
    untouched = idle + (lookups if spec.experts and not spec.tied_head else 0)
    return ParameterCount(total=total, checkpoint=_numbers(rules), active=total - untouched, embedding=lookups)


class ForwardFlops(Frozen):
    """FLOPs per token; a multiply-add counts as two."""

    layers: float
    """Matrix multiplications of all layers."""
    attention: float
    """Scores and weighted sums over `context` tokens, all layers."""
    head: float

    @property
    def total(self) -> float:
        return self.layers + self.attention + self.head


def matrix_flops(rules: Iterable[Rule], part: ModelPart = ModelPart.MAIN) -> float:
    """2 * active weights: one multiply-add each."""
    return 2.0 * sum(
        rule.elements * len(rule.layers or (0,)) * max(rule.num_active, 1)
        for rule in rules
        if rule.role is Role.MATRIX and rule.part is part and rule.copy_of is None
    )


def mixer_flops(mixer: Mixer, context_tokens: float) -> float:
    """Attention FLOPs of one token over `context_tokens` keys, limited by sliding windows and sparse-attention top-k."""
    seen, choosing = context_tokens, 0.0
    if isinstance(mixer, Attention) and mixer.window:
        seen = min(seen, mixer.window)
    if isinstance(mixer, LatentAttention) and mixer.indexer:
        if mixer.indexer.own:
            choosing = 2.0 * mixer.indexer.num_heads * mixer.indexer.head_dim * context_tokens
        seen = min(seen, mixer.indexer.top_k)
    return choosing + 2.0 * mixer.score_width * seen


def next_token_flops(spec: ModelSpec, rules: tuple[Rule, ...], context_tokens: float) -> ForwardFlops:
    """Of the multi-token-prediction layer, which uses the head a second time (arXiv 2412.19437, 2.2); zeros without one."""
    if spec.next_token is None:
        return ForwardFlops(layers=0.0, attention=0.0, head=0.0)
    attention = mixer_flops(spec.next_token.layer.mixer, context_tokens)
    head = 2.0 * spec.hidden_size * spec.vocab_size
    return ForwardFlops(layers=matrix_flops(rules, ModelPart.NEXT_TOKEN), attention=attention, head=head)


def forward_flops(spec: ModelSpec, rules: tuple[Rule, ...], context_tokens: float) -> ForwardFlops:
    """`context_tokens`: average number of keys a token attends to.

    Training over sequences of s: s for the convention of the Megatron papers (the masked half counted, arXiv 2104.04473),
    s / 2 for what a causal kernel computes and NVIDIA's newer tables count. A sliding window caps it.
    """
    attention = sum(mixer_flops(layer.mixer, context_tokens) for layer in spec.layers)
    head = 2.0 * spec.hidden_size * spec.vocab_size
    return ForwardFlops(layers=matrix_flops(rules), attention=attention, head=head)


class TrainingFlops(Frozen):
    """FLOPs per token."""

    model: float
    """Forward and backward: what MFU counts."""
    hardware: float
    """Including recomputation: what HFU counts."""


def training_flops(forward: ForwardFlops, recompute: str) -> TrainingFlops:
    """Backward is twice forward; full recomputation repeats the layers, selective only the attention core, the head never
    (arXiv 2104.04473 appendix: 96 B s L h^2 (1 + s/6h + V/16Lh); arXiv 2205.05198 appendix A)."""
    again = {"none": 0.0, "selective": forward.attention, "full": forward.layers + forward.attention}[recompute]
    return TrainingFlops(model=3 * forward.total, hardware=3 * forward.total + again)


def distinct_experts(moe: MoE, batch_tokens: float) -> float:
    """Expected number of distinct experts used by `batch_tokens` tokens with uniform routing: E (1 - (1 - k/E)^B)."""
    return moe.num_experts * (1 - (1 - moe.num_active / moe.num_experts) ** batch_tokens)
