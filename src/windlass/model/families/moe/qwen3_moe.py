"""Qwen3 MoE: softmax over all experts, then top-k, renormalised; no shared expert."""

from __future__ import annotations

import msgspec

from windlass.core.model import Dense, FeedForward, Layer, ModelSpec, MoE, Router, Scoring
from windlass.core.rule import Rule
from windlass.model.families.dense import qwen3
from windlass.model.families.reading.config import Config
from windlass.model.families.reading.fields import (
    ACTIVATIONS,
    read_active,
    read_context,
    read_experts,
    read_layers,
    read_native_scheme,
    read_rms,
    read_stops,
)
from windlass.model.families.reading.hints import Hints
from windlass.model.families.reading.naming import TensorNames, rules_from
from windlass.model.families.reading.rope import read_rope

NAMES: TensorNames = msgspec.structs.replace(
    qwen3.NAMES,
    router="mlp.gate",
    expert_gate="mlp.experts.{expert}.gate_proj",
    expert_up="mlp.experts.{expert}.up_proj",
    expert_down="mlp.experts.{expert}.down_proj",
    stacked_gate_up="mlp.experts.gate_up_proj",
    stacked_down="mlp.experts.down_proj",
)


def describe(config: Config, hints: Hints) -> ModelSpec:
    hidden, num_layers = config.integer("hidden_size"), read_layers(config)
    attention = qwen3.read_qwen_attention(config, hidden, num_layers)
    feed_forwards = _feed_forwards(config, num_layers)
    context = read_context(config)
    return ModelSpec(
        name="",
        family="qwen3_moe",
        hidden_size=hidden,
        vocab_size=config.integer("vocab_size"),
        context_tokens=context,
        layers=tuple(Layer(mixer=attention, feed_forward=ffn) for ffn in feed_forwards),
        norm=read_rms(config),
        positions=read_rope(config, attention.head_dim, layer_context=context),
        tied_head=config.flag("tie_word_embeddings", default=False),
        native_scheme=read_native_scheme(config),
        stop_token_ids=read_stops(config),
    )


def _feed_forwards(config: Config, num_layers: int) -> list[FeedForward]:
    """Layer i is MoE unless listed in mlp_only_layers or (i + 1) is not a multiple of decoder_sparse_step."""
    activation = config.choice("hidden_act", among=ACTIVATIONS, default="silu")
    num_experts = read_experts(config, "num_experts", "num_local_experts")
    moe = MoE(
        num_experts=num_experts,
        num_active=read_active(config, num_experts, "num_experts_per_tok"),
        intermediate_size=config.integer("moe_intermediate_size"),
        router=Router(scoring=Scoring.SOFTMAX, renormalize=config.flag("norm_topk_prob", default=False)),
        activation=activation,
    )
    dense = Dense(intermediate_size=config.integer("intermediate_size"), gated=True, activation=activation)
    step = config.integer("decoder_sparse_step", default=1)
    listed = set(config.integers("mlp_only_layers"))
    return [dense if index in listed or (index + 1) % step else moe for index in range(num_layers)]


def rules(spec: ModelSpec) -> tuple[Rule, ...]:
    return rules_from(spec, NAMES)
