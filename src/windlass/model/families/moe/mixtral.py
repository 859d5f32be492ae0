"""Mixtral: eight experts, softmax over the top two."""

from __future__ import annotations

import msgspec

from windlass.core.model import Layer, ModelSpec, MoE, Router, Scoring
from windlass.core.rule import Rule
from windlass.model.families.dense import llama
from windlass.model.families.reading.config import MAX_CONTEXT, Config
from windlass.model.families.reading.fields import (
    ACTIVATIONS,
    read_active,
    read_attention,
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
    llama.NAMES,
    router="block_sparse_moe.gate",
    stacked_router="mlp.gate",
    expert_gate="block_sparse_moe.experts.{expert}.w1",
    expert_up="block_sparse_moe.experts.{expert}.w3",
    expert_down="block_sparse_moe.experts.{expert}.w2",
    stacked_gate_up="mlp.experts.gate_up_proj",
    stacked_down="mlp.experts.down_proj",
)


def describe(config: Config, hints: Hints) -> ModelSpec:
    hidden = config.integer("hidden_size")
    attention = read_attention(config, hidden, window=config.optional_integer("sliding_window", high=MAX_CONTEXT))
    num_experts = read_experts(config, "num_local_experts")
    moe = MoE(
        num_experts=num_experts,
        num_active=read_active(config, num_experts, "num_experts_per_tok"),
        intermediate_size=config.integer("intermediate_size"),
        router=Router(scoring=Scoring.SOFTMAX_OF_TOP),
        activation=config.choice("hidden_act", among=ACTIVATIONS, default="silu"),
    )
    context = read_context(config)
    return ModelSpec(
        name="",
        family="mixtral",
        hidden_size=hidden,
        vocab_size=config.integer("vocab_size"),
        context_tokens=context,
        layers=(Layer(mixer=attention, feed_forward=moe),) * read_layers(config),
        norm=read_rms(config),
        positions=read_rope(config, attention.head_dim, layer_context=context),
        tied_head=config.flag("tie_word_embeddings", default=False),
        native_scheme=read_native_scheme(config),
        stop_token_ids=read_stops(config),
    )


def rules(spec: ModelSpec) -> tuple[Rule, ...]:
    return rules_from(spec, NAMES)
