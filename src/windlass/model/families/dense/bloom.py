"""BLOOM: ALiBi, a norm on the embedding, biases everywhere, the head tied; Q, K and V fused head by head."""

from __future__ import annotations

import msgspec

from windlass.core.model import Activation, Alibi, Dense, Layer, ModelSpec
from windlass.core.rule import Role, Rule
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

NAMES = TensorNames(
    embed="word_embeddings.weight",
    embed_norm="word_embeddings_layernorm",
    final_norm="ln_f",
    head="lm_head.weight",
    layer="h.{layer}.",
    mixer_norm="input_layernorm",
    ffn_norm="post_attention_layernorm",
    qkv="self_attention.query_key_value",
    fused_order=FusedOrder.GROUPED,
    o="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)
PREFIX = "transformer."
"""Some checkpoints prefix every name except the head's."""


def describe(config: Config, hints: Hints) -> ModelSpec:
    config.expect("apply_residual_connection_post_layernorm", False)
    hidden = config.integer("n_embed", "hidden_size")
    attention = read_attention(
        config, hidden, heads=("num_attention_heads", "n_head"), kv_heads=("n_head_kv",), qkv_bias=True, out_bias=True
    )
    ffn = Dense(intermediate_size=4 * hidden, gated=False, activation=Activation.GELU_TANH, bias=True)
    return ModelSpec(
        name="",
        family="bloom",
        hidden_size=hidden,
        vocab_size=config.integer("vocab_size"),
        context_tokens=read_context(config, "seq_length", "max_position_embeddings", default=2048),
        layers=(Layer(mixer=attention, feed_forward=ffn),) * read_layers(config, "n_layer", "num_hidden_layers"),
        norm=read_layer_norm(config, "layer_norm_epsilon"),
        positions=Alibi(),
        tied_head=config.flag("tie_word_embeddings", default=True),
        embedding_norm=True,
        native_scheme=read_native_scheme(config),
        stop_token_ids=read_stops(config),
        dropout=read_dropout(config),
    )


def rules(spec: ModelSpec) -> tuple[Rule, ...]:
    return tuple(rule if rule.role is Role.HEAD else _with_prefix(rule) for rule in rules_from(spec, NAMES))


def _with_prefix(rule: Rule) -> Rule:
    also = tuple(msgspec.structs.replace(source, name=PREFIX + source.name) for source in rule.sources)
    return msgspec.structs.replace(rule, sources=rule.sources + also)
