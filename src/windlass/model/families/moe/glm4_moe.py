"""GLM-4.5, 4.5-Air, 4.6, 4.7 and INTELLECT-3: sigmoid router with a correction bias, one shared expert, dense first layers,
half of each head rotated (halves, not pairs), biases on Q, K and V, and an MTP layer that some checkpoints carry."""

from __future__ import annotations

import msgspec

from windlass.core.model import Dense, Layer, ModelSpec, MoE, NextTokenLayer, Router, Scoring
from windlass.core.rule import Rule
from windlass.model.families.moe import qwen3_moe
from windlass.model.families.reading.config import MAX_LAYERS, Config
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
    qwen3_moe.NAMES,
    correction="mlp.gate.e_score_correction_bias",
    shared="mlp.shared_experts",
    eh_proj="eh_proj",
    enorm="enorm",
    hnorm="hnorm",
    next_norm="shared_head.norm",
    next_embed="embed_tokens.weight",
    next_head="shared_head.head.weight",
)


def read_sigmoid_moe(config: Config) -> MoE:
    """Sigmoid scores; a bias per expert for selection only; selected scores are renormalised and scaled."""
    num_experts = read_experts(config, "n_routed_experts", "num_local_experts")
    num_groups = config.integer("n_group", default=1, high=num_experts)
    if num_experts % num_groups:
        raise config.refuse(f"n_group {num_groups} does not divide {num_experts} experts")
    width = config.integer("moe_intermediate_size")
    config.expect("scoring_func", "sigmoid")
    config.expect("topk_method", "noaux_tc")
    return MoE(
        num_experts=num_experts,
        num_active=read_active(config, num_experts, "num_experts_per_tok"),
        intermediate_size=width,
        router=Router(
            scoring=Scoring.SIGMOID,
            correction_bias=True,
            renormalize=config.flag("norm_topk_prob", default=True),
            scale=config.number("routed_scaling_factor", default=1.0),
            num_groups=num_groups,
            num_chosen_groups=config.integer("topk_group", default=1, high=num_groups),
        ),
        activation=config.choice("hidden_act", among=ACTIVATIONS, default="silu"),
        shared_intermediate_size=width * config.integer("n_shared_experts", default=0, low=0, high=1024),
    )


def dense_then_moe(config: Config, moe: MoE, num_layers: int) -> list[Dense | MoE]:
    """The first `first_k_dense_replace` layers are dense, or mlp_layer_types lists each; both must agree."""
    dense = Dense(intermediate_size=config.integer("intermediate_size"), gated=True, activation=moe.activation)
    kinds = config.strings("mlp_layer_types", length=num_layers)
    if kinds is not None and set(kinds) - {"dense", "sparse"}:
        raise config.refuse("mlp_layer_types should be 'dense' or 'sparse'")
    first = config.integer("first_k_dense_replace", default=0 if kinds else None, low=0, high=MAX_LAYERS)
    expected = tuple("dense" if index < first else "sparse" for index in range(num_layers))
    if kinds is not None and kinds != expected and "first_k_dense_replace" in config.values:
        raise config.refuse("mlp_layer_types does not agree with first_k_dense_replace")
    return [dense if kind == "dense" else moe for kind in kinds or expected]


def read_next_token(config: Config, hints: Hints, layer: Layer, *, own_embeddings: bool) -> NextTokenLayer | None:
    """From the checkpoint's tensor names where known, else from the config."""
    claimed = config.integer("num_nextn_predict_layers", default=0, low=0, high=1)
    present = bool(claimed) if hints.next_token_layer is None else hints.next_token_layer
    own = own_embeddings if hints.own_next_token_embeddings is None else hints.own_next_token_embeddings
    return NextTokenLayer(layer=layer, own_embeddings=own) if present else None


def describe(config: Config, hints: Hints) -> ModelSpec:
    hidden, num_layers = config.integer("hidden_size"), read_layers(config)
    # An absent use_qk_norm means none: Air and INTELLECT-3 have no such tensors.
    attention = read_attention(
        config,
        hidden,
        qkv_bias=config.flag("attention_bias", default=False),
        qk_norm=config.flag("use_qk_norm", default=False),
    )
    moe = read_sigmoid_moe(config)
    context = read_context(config)
    return ModelSpec(
        name="",
        family="glm4_moe",
        hidden_size=hidden,
        vocab_size=config.integer("vocab_size"),
        context_tokens=context,
        layers=tuple(Layer(mixer=attention, feed_forward=ffn) for ffn in dense_then_moe(config, moe, num_layers)),
        norm=read_rms(config),
        positions=read_rope(config, attention.head_dim, partial=0.5, layer_context=context),
        tied_head=config.flag("tie_word_embeddings", default=False),
        next_token=read_next_token(config, hints, Layer(mixer=attention, feed_forward=moe), own_embeddings=True),
        native_scheme=read_native_scheme(config),
        stop_token_ids=read_stops(config),
    )


def rules(spec: ModelSpec) -> tuple[Rule, ...]:
    return rules_from(spec, NAMES)
