"""GPT-NeoX: attention and MLP in parallel with a norm each, a quarter of each head rotated, Q, K and V fused head by head."""

from __future__ import annotations

from windlass.core.model import Dense, Layer, ModelSpec, Wiring
from windlass.core.rule import Rule
from windlass.model.families.reading.config import Config
from windlass.model.families.reading.fields import (
    ACTIVATIONS,
    read_attention,
    read_context,
    read_dropout,
    read_layer_norm,
    read_layers,
    read_native_scheme,
    read_stops,
)
from windlass.model.families.reading.hints import Hints
from windlass.model.families.reading.naming import FusedOrder, TensorNames, rules_from
from windlass.model.families.reading.rope import read_rope

NAMES = TensorNames(
    embed="gpt_neox.embed_in.weight",
    final_norm="gpt_neox.final_layer_norm",
    head="embed_out.weight",
    head_also="lm_head.weight",
    layer="gpt_neox.layers.{layer}.",
    mixer_norm="input_layernorm",
    ffn_norm="post_attention_layernorm",
    qkv="attention.query_key_value",
    fused_order=FusedOrder.GROUPED,
    o="attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)


def describe(config: Config, hints: Hints) -> ModelSpec:
    hidden = config.integer("hidden_size")
    bias = config.flag("attention_bias", default=True)
    unused = ("the format has no KV head count",)
    attention = read_attention(config, hidden, kv_heads=unused, qkv_bias=bias, out_bias=bias)
    ffn = Dense(
        intermediate_size=config.integer("intermediate_size"),
        gated=False,
        activation=config.choice("hidden_act", among=ACTIVATIONS, default="gelu"),
        bias=True,
    )
    parallel = config.flag("use_parallel_residual", default=True)
    context = read_context(config)
    return ModelSpec(
        name="",
        family="gpt_neox",
        hidden_size=hidden,
        vocab_size=config.integer("vocab_size"),
        context_tokens=context,
        layers=(Layer(mixer=attention, feed_forward=ffn, wiring=Wiring.PARALLEL if parallel else Wiring.PRE),)
        * read_layers(config),
        norm=read_layer_norm(config, "layer_norm_eps"),
        positions=read_rope(config, attention.head_dim, partial=0.25, layer_context=context),
        tied_head=config.flag("tie_word_embeddings", default=False),
        native_scheme=read_native_scheme(config),
        stop_token_ids=read_stops(config),
        dropout=read_dropout(config),
    )


def rules(spec: ModelSpec) -> tuple[Rule, ...]:
    return rules_from(spec, NAMES)
