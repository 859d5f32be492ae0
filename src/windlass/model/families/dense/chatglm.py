"""glm-4-9b and glm-4-9b-chat in their original form (remote code, which is not run here): fused QKV and gate/up, its own keys."""

from __future__ import annotations

from windlass.core.model import Activation, Dense, Layer, ModelSpec, Norm
from windlass.core.rule import Rule
from windlass.model.families.reading.config import Config
from windlass.model.families.reading.fields import read_attention, read_context, read_layers, read_native_scheme, read_stops
from windlass.model.families.reading.hints import Hints
from windlass.model.families.reading.naming import FusedOrder, TensorNames, rules_from
from windlass.model.families.reading.rope import read_rope

NAMES = TensorNames(
    embed="transformer.embedding.word_embeddings.weight",
    final_norm="transformer.encoder.final_layernorm",
    head="transformer.output_layer.weight",
    layer="transformer.encoder.layers.{layer}.",
    mixer_norm="input_layernorm",
    ffn_norm="post_attention_layernorm",
    qkv="self_attention.query_key_value",
    fused_order=FusedOrder.CONTIGUOUS,
    o="self_attention.dense",
    gate_up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)


def describe(config: Config, hints: Hints) -> ModelSpec:
    for key, value in (("rmsnorm", True), ("original_rope", True), ("post_layer_norm", True), ("multi_query_attention", True)):
        config.expect(key, value)
    config.expect("apply_residual_connection_post_layernorm", False)
    # fp16 workarounds of the original code; they do not change the result.
    config.ignore("apply_query_key_layer_scaling", "fp32_residual_connection")
    hidden = config.integer("hidden_size")
    bias = config.flag("add_bias_linear", default=False)
    attention = read_attention(
        config,
        hidden,
        kv_heads=("multi_query_group_num",),
        head_dim=("kv_channels",),
        qkv_bias=bias or config.flag("add_qkv_bias", default=False),
        out_bias=bias,
    )
    ffn = Dense(intermediate_size=config.integer("ffn_hidden_size"), gated=True, activation=Activation.SILU, bias=bias)
    context = read_context(config, "seq_length")
    return ModelSpec(
        name="",
        family="chatglm",
        hidden_size=hidden,
        vocab_size=config.integer("padded_vocab_size", "vocab_size"),
        context_tokens=context,
        layers=(Layer(mixer=attention, feed_forward=ffn),) * read_layers(config, "num_layers", "num_hidden_layers"),
        norm=Norm(kind="rms", eps=config.number("layernorm_epsilon", default=1e-5, high=1.0)),
        positions=read_rope(
            config,
            attention.head_dim,
            interleaved=True,
            partial=0.5,
            theta_factor=config.number("rope_ratio", default=1.0, low=1e-3, high=1e6),
            layer_context=context,
        ),
        tied_head=config.flag("tie_word_embeddings", default=False),
        native_scheme=read_native_scheme(config),
        stop_token_ids=read_stops(config),
    )


def rules(spec: ModelSpec) -> tuple[Rule, ...]:
    return rules_from(spec, NAMES)
