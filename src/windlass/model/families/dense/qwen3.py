"""Qwen3, dense: as Llama, with every head of Q and K normed before rotation."""

from __future__ import annotations

import msgspec

from windlass.core.model import Attention, Dense, Layer, ModelSpec
from windlass.core.rule import Rule
from windlass.model.families.dense import llama
from windlass.model.families.reading.config import MAX_CONTEXT, Config
from windlass.model.families.reading.fields import (
    ACTIVATIONS,
    read_attention,
    read_context,
    read_layers,
    read_native_scheme,
    read_rms,
    read_stops,
)
from windlass.model.families.reading.hints import Hints
from windlass.model.families.reading.naming import TensorNames, rules_from
from windlass.model.families.reading.rope import read_rope

NAMES: TensorNames = msgspec.structs.replace(llama.NAMES, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")


def read_qwen_attention(config: Config, hidden: int, num_layers: int) -> Attention:
    """Sliding windows exist in the config but are off in every published model."""
    config.ignore("max_window_layers", "sliding_window")
    if set(config.strings("layer_types", length=num_layers) or ()) - {"full_attention"}:
        raise config.refuse("layer_types other than full_attention are not supported")
    if config.flag("use_sliding_window", default=False):
        config.integer("sliding_window", high=MAX_CONTEXT)
        raise config.refuse(f"use_sliding_window is true; windows over the upper of {num_layers} layers are not supported")
    bias = config.flag("attention_bias", default=False)
    return read_attention(config, hidden, qkv_bias=bias, out_bias=bias, qk_norm=True)


def describe(config: Config, hints: Hints) -> ModelSpec:
    hidden, num_layers = config.integer("hidden_size"), read_layers(config)
    attention = read_qwen_attention(config, hidden, num_layers)
    ffn = Dense(
        intermediate_size=config.integer("intermediate_size"),
        gated=True,
        activation=config.choice("hidden_act", among=ACTIVATIONS, default="silu"),
    )
    context = read_context(config)
    return ModelSpec(
        name="",
        family="qwen3",
        hidden_size=hidden,
        vocab_size=config.integer("vocab_size"),
        context_tokens=context,
        layers=(Layer(mixer=attention, feed_forward=ffn),) * num_layers,
        norm=read_rms(config),
        positions=read_rope(config, attention.head_dim, layer_context=context),
        tied_head=config.flag("tie_word_embeddings", default=False),
        native_scheme=read_native_scheme(config),
        stop_token_ids=read_stops(config),
    )


def rules(spec: ModelSpec) -> tuple[Rule, ...]:
    return rules_from(spec, NAMES)
