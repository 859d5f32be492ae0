"""gpt-oss: sliding window in every other layer, attention sinks, biases everywhere, experts published in MXFP4 with gate and up
interleaved row by row."""

from __future__ import annotations

import msgspec

from windlass.core.model import Activation, Layer, ModelSpec, MoE, Router, Scoring
from windlass.core.rule import Rule
from windlass.model.families.dense import llama
from windlass.model.families.reading.config import MAX_CONTEXT, Config
from windlass.model.families.reading.fields import (
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
    sinks="self_attn.sinks",
    router="mlp.router",
    stacked_gate_up="mlp.experts.gate_up_proj",
    stacked_down="mlp.experts.down_proj",
    stacked_encoding="mxfp4",
)


def describe(config: Config, hints: Hints) -> ModelSpec:
    hidden, num_layers = config.integer("hidden_size"), read_layers(config)
    bias = config.flag("attention_bias", default=True)
    attention = read_attention(config, hidden, qkv_bias=bias, out_bias=bias, sinks=True)
    windowed = msgspec.structs.replace(attention, window=config.integer("sliding_window", default=128, high=MAX_CONTEXT))
    kinds = config.strings("layer_types", length=num_layers) or tuple(
        "full_attention" if index % 2 else "sliding_attention" for index in range(num_layers)
    )
    if set(kinds) - {"full_attention", "sliding_attention"}:
        raise config.refuse("layer_types should be full_attention or sliding_attention")
    moe = _moe(config)
    context = read_context(config)
    config.ignore("initial_context_length")  # restates original_max_position_embeddings of rope_scaling
    return ModelSpec(
        name="",
        family="gpt_oss",
        hidden_size=hidden,
        vocab_size=config.integer("vocab_size"),
        context_tokens=context,
        layers=tuple(Layer(mixer=windowed if kind == "sliding_attention" else attention, feed_forward=moe) for kind in kinds),
        norm=read_rms(config),
        positions=read_rope(config, attention.head_dim, layer_context=context),
        tied_head=config.flag("tie_word_embeddings", default=False),
        native_scheme=read_native_scheme(config),
        stop_token_ids=read_stops(config),
    )


def _moe(config: Config) -> MoE:
    config.expect("hidden_act", "silu")
    config.expect("swiglu_alpha", 1.702)
    num_experts = read_experts(config, "num_local_experts", "num_experts")
    return MoE(
        num_experts=num_experts,
        num_active=read_active(config, num_experts, "num_experts_per_tok", "experts_per_token"),
        intermediate_size=config.integer("intermediate_size"),
        router=Router(scoring=Scoring.SOFTMAX_OF_TOP, bias=True),
        activation=Activation.CLAMPED_SWIGLU,
        bias=True,
        clamp=config.number("swiglu_limit", default=7.0),
    )


def rules(spec: ModelSpec) -> tuple[Rule, ...]:
    return rules_from(spec, NAMES)
