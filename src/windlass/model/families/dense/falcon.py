"""Falcon: 7B (one norm, one KV head), 40B and 180B (two norms, eight KV heads), and the older RW models (ALiBi, sequential)."""

from __future__ import annotations

import msgspec

from windlass.core.model import Activation, Alibi, Attention, Dense, Layer, ModelSpec, Wiring
from windlass.core.rule import Rule
from windlass.model.families.reading.config import Config
from windlass.model.families.reading.fields import (
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
    embed="transformer.word_embeddings.weight",
    final_norm="transformer.ln_f",
    head="lm_head.weight",
    layer="transformer.h.{layer}.",
    mixer_norm="input_layernorm",
    ffn_norm="post_attention_layernorm",
    qkv="self_attention.query_key_value",
    fused_order=FusedOrder.GROUPED,
    o="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)
_TWO_NORMS: TensorNames = msgspec.structs.replace(NAMES, mixer_norm="ln_attn", ffn_norm="ln_mlp")


def describe(config: Config, hints: Hints) -> ModelSpec:
    config.expect("apply_residual_connection_post_layernorm", False)
    config.expect("activation", "gelu")
    hidden = config.integer("hidden_size", "n_embed")
    bias = config.flag("bias", default=False)
    attention = _attention(config, hidden, bias)
    width = config.integer("ffn_hidden_size", default=4 * hidden)
    ffn = Dense(intermediate_size=width, gated=False, activation=Activation.GELU, bias=bias)
    context = read_context(config, default=2048)
    alibi = config.flag("alibi", default=False)
    tied = config.flag("tie_word_embeddings", default=True)
    if alibi:
        config.ignore("rope_parameters", "rope_theta", "rope_scaling")  # present, but ignored with ALiBi
    positions = Alibi(before_scaling=True) if alibi else read_rope(config, attention.head_dim, layer_context=context)
    return ModelSpec(
        name="",
        family="falcon",
        hidden_size=hidden,
        vocab_size=config.integer("vocab_size"),
        context_tokens=context,
        layers=(Layer(mixer=attention, feed_forward=ffn, wiring=_wiring(config)),)
        * read_layers(config, "num_hidden_layers", "n_layer"),
        norm=read_layer_norm(config, "layer_norm_epsilon"),
        positions=positions,
        tied_head=tied,
        head_copy=tied,  # published files store the tied head as well
        native_scheme=read_native_scheme(config),
        stop_token_ids=read_stops(config),
        dropout=read_dropout(config),
    )


def _attention(config: Config, hidden: int, bias: bool) -> Attention:
    """New architecture: `num_kv_heads`. Old: one KV head with multi_query, else as many as heads."""
    heads, kv = ("num_attention_heads", "n_head"), ("num_kv_heads", "n_head_kv")
    multi_query = config.flag("multi_query", default=True)
    if config.flag("new_decoder_architecture", default=False):
        return read_attention(config, hidden, heads=heads, kv_heads=kv, qkv_bias=bias, out_bias=bias)
    config.ignore(*kv)
    unused = ("an old-architecture config has no KV head count of its own",)
    return read_attention(
        config, hidden, heads=heads, kv_heads=unused, default_kv_heads=1 if multi_query else None, qkv_bias=bias, out_bias=bias
    )


def _wiring(config: Config) -> Wiring:
    parallel = config.flag("parallel_attn", default=True)
    norms = config.optional_integer("num_ln_in_parallel_attn", high=2)
    if config.flag("new_decoder_architecture", default=False):
        return Wiring.PARALLEL_ONE_NORM if norms == 1 else Wiring.PARALLEL
    return Wiring.PARALLEL_ONE_NORM if parallel else Wiring.PRE


def rules(spec: ModelSpec) -> tuple[Rule, ...]:
    return rules_from(spec, _TWO_NORMS if spec.layers[0].wiring is Wiring.PARALLEL else NAMES)
