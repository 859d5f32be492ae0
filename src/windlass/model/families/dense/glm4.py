"""GLM-4-0414, dense: norms before and after both halves of a layer, half of each head rotated in pairs, gate and up fused."""

from __future__ import annotations

import msgspec

from windlass.core.model import Dense, Layer, ModelSpec, Wiring
from windlass.core.rule import Rule
from windlass.model.families.dense import llama
from windlass.model.families.reading.config import Config
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

NAMES: TensorNames = msgspec.structs.replace(
    llama.NAMES,
    mixer_post_norm="post_self_attn_layernorm",
    ffn_post_norm="post_mlp_layernorm",
    gate="",
    up="",
    gate_up="mlp.gate_up_proj",
)


def describe(config: Config, hints: Hints) -> ModelSpec:
    hidden = config.integer("hidden_size")
    attention = read_attention(config, hidden, qkv_bias=config.flag("attention_bias", default=False))
    ffn = Dense(
        intermediate_size=config.integer("intermediate_size"),
        gated=True,
        activation=config.choice("hidden_act", among=ACTIVATIONS, default="silu"),
    )
    context = read_context(config)
    return ModelSpec(
        name="",
        family="glm4",
        hidden_size=hidden,
        vocab_size=config.integer("vocab_size"),
        context_tokens=context,
        layers=(Layer(mixer=attention, feed_forward=ffn, wiring=Wiring.SANDWICH),) * read_layers(config),
        norm=read_rms(config),
        positions=read_rope(config, attention.head_dim, interleaved=True, partial=0.5, layer_context=context),
        tied_head=config.flag("tie_word_embeddings", default=False),
        native_scheme=read_native_scheme(config),
        stop_token_ids=read_stops(config),
    )


def rules(spec: ModelSpec) -> tuple[Rule, ...]:
    return rules_from(spec, NAMES)
