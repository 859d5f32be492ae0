"""Latent attention with a sigmoid router: DeepSeek-V3, GLM-4.7-Flash (glm4_moe_lite) and GLM-5.x (glm_moe_dsa, with an indexer)."""

from __future__ import annotations

import msgspec

from windlass.core.model import Indexer, LatentAttention, Layer, ModelSpec
from windlass.core.rule import Rule
from windlass.model.families.moe import glm4_moe
from windlass.model.families.reading.config import MAX_CONTEXT, MAX_LAYERS, Config
from windlass.model.families.reading.fields import read_context, read_layers, read_native_scheme, read_rms, read_stops
from windlass.model.families.reading.hints import Hints
from windlass.model.families.reading.naming import TensorNames, rules_from
from windlass.model.families.reading.rope import read_rope

NAMES: TensorNames = msgspec.structs.replace(
    glm4_moe.NAMES,
    q_a="self_attn.q_a_proj",
    q_a_norm="self_attn.q_a_layernorm",
    q_b="self_attn.q_b_proj",
    kv_a="self_attn.kv_a_proj_with_mqa",
    kv_a_norm="self_attn.kv_a_layernorm",
    kv_b="self_attn.kv_b_proj",
    indexer="self_attn.indexer",
)

# GLM-5's MTP layer shares the model's embedding and head; the others' checkpoints carry copies.
_OWN_EMBEDDINGS = {"deepseek_v3": True, "glm4_moe_lite": True, "glm_moe_dsa": False}


def describe(config: Config, hints: Hints) -> ModelSpec:
    model_type = str(config.values["model_type"])
    hidden, num_layers = config.integer("hidden_size"), read_layers(config)
    moe = glm4_moe.read_sigmoid_moe(config)
    feed_forwards = glm4_moe.dense_then_moe(config, moe, num_layers)
    mixers = _mixers(config, num_layers, indexed=model_type == "glm_moe_dsa")
    layers = tuple(Layer(mixer=mixer, feed_forward=ffn) for mixer, ffn in zip(mixers, feed_forwards, strict=True))
    context = read_context(config)
    return ModelSpec(
        name="",
        family=model_type,
        hidden_size=hidden,
        vocab_size=config.integer("vocab_size"),
        context_tokens=context,
        layers=layers,
        norm=read_rms(config),
        positions=read_rope(config, mixers[0].rope_head_dim, interleaved=True, layer_context=context),
        tied_head=config.flag("tie_word_embeddings", default=False),
        next_token=glm4_moe.read_next_token(
            config, hints, Layer(mixer=mixers[0], feed_forward=moe), own_embeddings=_OWN_EMBEDDINGS[model_type]
        ),
        native_scheme=read_native_scheme(config),
        stop_token_ids=read_stops(config),
        engines=("vllm",) if model_type == "glm_moe_dsa" else ("windlass", "vllm"),
    )


def _mixers(config: Config, num_layers: int, *, indexed: bool) -> list[LatentAttention]:
    config.expect("attention_bias", False)
    config.expect("moe_layer_freq", 1)
    config.expect("rope_interleave", True)
    nope, rope = config.integer("qk_nope_head_dim", high=65536), config.integer("qk_rope_head_dim", high=65536)
    config.expect("qk_head_dim", nope + rope)
    config.ignore("head_dim", "num_key_value_heads")  # redundant or contradictory; no implementation reads them
    plain = LatentAttention(
        num_heads=config.integer("num_attention_heads"),
        q_lora_rank=config.optional_integer("q_lora_rank"),
        kv_lora_rank=config.integer("kv_lora_rank"),
        nope_head_dim=nope,
        rope_head_dim=rope,
        v_head_dim=config.integer("v_head_dim", high=65536),
    )
    if not indexed:
        return [plain] * num_layers
    return [msgspec.structs.replace(plain, indexer=index) for index in _indexers(config, num_layers)]


def _indexers(config: Config, num_layers: int) -> list[Indexer]:
    """GLM-5 has one in every layer; GLM-5.2 in every fourth, and the layers between reuse its selection."""
    config.expect("indexer_rope_interleave", True)
    config.ignore("index_share_for_mtp_iteration")
    config.expect("mlp_bias", False)
    if set(config.strings("layer_types", length=num_layers) or ()) - {"indexed_attention"}:
        raise config.refuse("layer_types should be 'indexed_attention' throughout")
    kinds = config.strings("indexer_types", length=num_layers) or _scheduled_indexers(config, num_layers)
    # indexer_types replaces these.
    config.ignore("index_skip_topk_offset", "index_topk_freq", "index_topk_pattern")
    if set(kinds) - {"full", "shared"} or kinds[0] != "full":
        raise config.refuse("indexer_types should be 'full' or 'shared' and begin with 'full'")
    own = Indexer(
        num_heads=config.integer("index_n_heads"),
        head_dim=config.integer("index_head_dim", high=65536),
        top_k=config.integer("index_topk", high=MAX_CONTEXT),
        own=True,
    )
    shared = msgspec.structs.replace(own, own=False)
    return [own if kind == "full" else shared for kind in kinds]


def _scheduled_indexers(config: Config, num_layers: int) -> tuple[str, ...]:
    """Every `index_topk_freq`-th layer from `index_skip_topk_offset` on has an indexer; without the keys, all do."""
    if config.values.get("index_topk_pattern") is not None:
        raise config.refuse("index_topk_pattern is not supported; use indexer_types")
    every = config.integer("index_topk_freq", default=1, high=MAX_LAYERS)
    offset = config.integer("index_skip_topk_offset", default=2, low=0, high=MAX_LAYERS)
    return tuple("shared" if max(index - offset + 1, 0) % every else "full" for index in range(num_layers))


def rules(spec: ModelSpec) -> tuple[Rule, ...]:
    return rules_from(spec, NAMES)
