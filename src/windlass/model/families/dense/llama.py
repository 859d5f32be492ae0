"""Llama 2 and 3, CodeLlama, ALIA, SmolLM2, Mistral: RMSNorm, rotary positions, grouped queries, gated SiLU."""

from __future__ import annotations

from windlass.core.model import Dense, Layer, ModelSpec
from windlass.core.rule import Rule
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

NAMES = TensorNames(
    embed="model.embed_tokens.weight",
    final_norm="model.norm",
    head="lm_head.weight",
    layer="model.layers.{layer}.",
    mixer_norm="input_layernorm",
    ffn_norm="post_attention_layernorm",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    o="self_attn.o_proj",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)


def describe(config: Config, hints: Hints) -> ModelSpec:
    hidden = config.integer("hidden_size")
    bias = config.flag("attention_bias", default=False)
    window = config.optional_integer("sliding_window", high=MAX_CONTEXT)
    attention = read_attention(config, hidden, qkv_bias=bias, out_bias=bias, window=window)
    ffn = Dense(
        intermediate_size=config.integer("intermediate_size"),
        gated=True,
        activation=config.choice("hidden_act", among=ACTIVATIONS, default="silu"),
        bias=config.flag("mlp_bias", default=False),
    )
    context = read_context(config)
    config.ignore("is_llama_config", "rope_interleaved")  # written by SmolLM2's trainer; both restate the default
    config.expect("rope_interleaved", False)
    return ModelSpec(
        name="",
        family=config.values["model_type"],
        hidden_size=hidden,
        vocab_size=config.integer("vocab_size"),
        context_tokens=context,
        layers=(Layer(mixer=attention, feed_forward=ffn),) * read_layers(config),
        norm=read_rms(config),
        positions=read_rope(config, attention.head_dim, layer_context=context),
        tied_head=config.flag("tie_word_embeddings", default=False),
        native_scheme=read_native_scheme(config),
        stop_token_ids=read_stops(config),
    )


def rules(spec: ModelSpec) -> tuple[Rule, ...]:
    return rules_from(spec, NAMES)
