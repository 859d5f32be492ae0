"""GPT-2 and GPT-SW3: learned positions, biases everywhere, the head tied, matrices stored [in, out]."""

from __future__ import annotations

from windlass.core.model import Dense, Layer, LearnedPositions, ModelSpec
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

NAMES = TensorNames(
    embed="transformer.wte.weight",
    positions="transformer.wpe.weight",
    final_norm="transformer.ln_f",
    head="lm_head.weight",
    layer="transformer.h.{layer}.",
    mixer_norm="ln_1",
    ffn_norm="ln_2",
    qkv="attn.c_attn",
    fused_order=FusedOrder.CONTIGUOUS,
    o="attn.c_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
    transposed=True,
)


def read_gpt(config: Config, family: str, *, default_activation: str, num_kv_heads: int | None) -> ModelSpec:
    """What GPT-2 and GPT-BigCode share: the same keys, apart from how many KV heads there are."""
    config.expect("scale_attn_weights", True)
    config.expect("scale_attn_by_inverse_layer_idx", False)
    hidden = config.integer("n_embd", "hidden_size")
    unused = ("the format has no KV head count",)
    attention = read_attention(
        config,
        hidden,
        heads=("n_head", "num_attention_heads"),
        kv_heads=unused,
        default_kv_heads=num_kv_heads,
        qkv_bias=True,
        out_bias=True,
    )
    ffn = Dense(
        intermediate_size=config.integer("n_inner", default=4 * hidden),
        gated=False,
        activation=config.choice("activation_function", among=ACTIVATIONS, default=default_activation),
        bias=True,
    )
    config.ignore("n_ctx")  # restates n_positions
    context = read_context(config, "n_positions", "max_position_embeddings")
    return ModelSpec(
        name="",
        family=family,
        hidden_size=hidden,
        vocab_size=config.integer("vocab_size"),
        context_tokens=context,
        layers=(Layer(mixer=attention, feed_forward=ffn),) * read_layers(config, "n_layer", "num_hidden_layers"),
        norm=read_layer_norm(config, "layer_norm_epsilon"),
        positions=LearnedPositions(max_positions=context),
        tied_head=config.flag("tie_word_embeddings", default=True),
        native_scheme=read_native_scheme(config),
        stop_token_ids=read_stops(config),
        dropout=read_dropout(config),
    )


def describe(config: Config, hints: Hints) -> ModelSpec:
    return read_gpt(config, "gpt2", default_activation="gelu_new", num_kv_heads=None)


def rules(spec: ModelSpec) -> tuple[Rule, ...]:
    return rules_from(spec, NAMES)
