"""Configs of several years and spellings describe the same model, and what is not understood is refused by its key's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from windlass.core.model import (
    Activation,
    Alibi,
    Attention,
    BandScaling,
    Dense,
    LatentAttention,
    LinearScaling,
    MoE,
    Rope,
    Scoring,
    Wiring,
    YarnScaling,
)
from windlass.errors import BadConfig
from windlass.model.families import describe
from windlass.model.families.registry import find, published_config, spec_of

pytestmark = pytest.mark.pure

TINY = Path(__file__).parents[1] / "tiny"
Values = dict[str, Any]


def tiny(name: str, *drop: str, **changes: Any) -> Values:
    values = json.loads((TINY / f"{name}.json").read_text()) | changes
    return {key: value for key, value in values.items() if key not in drop}


def renamed(values: Values, **names: str) -> Values:
    return {names.get(key, key): value for key, value in values.items()}


def published(name: str) -> Values:
    model = find(name)
    assert model is not None
    return published_config(model)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 32}

PAIRS: dict[str, tuple[Values, Values]] = {
    "gpt2 in general words": (
        tiny("gpt2"),
        renamed(tiny("gpt2"), n_embd="hidden_size", n_head="num_attention_heads", n_layer="num_hidden_layers", n_positions="max_position_embeddings"),
    ),
    "bloom of 2022": (tiny("bloom"), renamed(tiny("bloom"), hidden_size="n_embed", n_head="num_attention_heads")),
    "bloom in general words": (tiny("bloom"), renamed(tiny("bloom"), n_layer="num_hidden_layers", n_head="num_attention_heads")),
    "bloom with both names": (tiny("bloom"), tiny("bloom", n_embed=30)),
    "rope_theta at the top": (tiny("qwen3"), tiny("qwen3", "rope_parameters", rope_theta=1e6, rope_scaling=None)),
    "theta as an integer": (tiny("qwen3"), tiny("qwen3", "rope_parameters", rope_theta=1000000)),
    "partial rotation at the top": (tiny("glm4"), tiny("glm4", "rope_parameters", rope_theta=10000, partial_rotary_factor=0.5)),
    "partial rotation left out": (tiny("glm4_moe"), tiny("glm4_moe", "rope_parameters", rope_theta=1000000)),
    "neox of 2022": (tiny("gpt_neox"), tiny("gpt_neox", "rope_parameters", rotary_emb_base=10000, rotary_pct=0.25)),
    "llama 3 scaling of 2024": (tiny("llama"), tiny("llama", "rope_parameters", rope_theta=500000.0, rope_scaling={"rope_type": "llama3", **LLAMA3})),
    "yarn under its old key": (
        tiny("deepseek_v3"),
        tiny("deepseek_v3", "rope_parameters", rope_theta=10000, rope_scaling={"type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
    ),
    "type and rope_type together": (
        tiny("gpt_oss"),
        tiny("gpt_oss", "rope_parameters", rope_theta=150000, rope_scaling={"type": "yarn", "rope_type": "yarn", "truncate": False, **YARN}),
    ),
    "experts by another name": (tiny("qwen3_moe"), renamed(tiny("qwen3_moe"), num_experts="num_local_experts")),
    "active experts by another name": (tiny("gpt_oss"), renamed(tiny("gpt_oss"), num_experts_per_tok="experts_per_token")),
    "dense layers by list": (tiny("glm4_moe"), tiny("glm4_moe", "first_k_dense_replace", mlp_layer_types=["dense", "sparse", "sparse"])),
    "dense layers by both": (tiny("glm4_moe"), tiny("glm4_moe", mlp_layer_types=["dense", "sparse", "sparse"])),
    "dense layers by count": (tiny("glm4_moe_lite"), tiny("glm4_moe_lite", "mlp_layer_types", first_k_dense_replace=1)),
    "indexers in every layer": (tiny("glm_moe_dsa", "indexer_types"), tiny("glm_moe_dsa", indexer_types=["full"] * 4)),
    "indexers by schedule": (
        tiny("glm_moe_dsa", "indexer_types", index_topk_freq=2, index_skip_topk_offset=2),
        tiny("glm_moe_dsa", indexer_types=["full", "full", "shared", "full"]),
    ),
    "falcon of 2023": (
        tiny("falcon-40b"),
        renamed(tiny("falcon-40b", model_type="RefinedWeb"), num_attention_heads="n_head", num_kv_heads="n_head_kv", num_hidden_layers="n_layer"),
    ),
    "falcon 7B of 2023": (
        tiny("falcon-7b"),
        renamed(tiny("falcon-7b", model_type="RefinedWebModel"), num_attention_heads="n_head", num_hidden_layers="n_layer"),
    ),
    "falcon with a count that does not apply": (tiny("falcon-7b"), tiny("falcon-7b", num_kv_heads=5)),
    "kv heads left out": (tiny("llama", num_key_value_heads=6), tiny("llama", "num_key_value_heads")),
    "null is absent": (tiny("llama-tied"), tiny("llama-tied", rope_scaling=None, sliding_window=None, quantization_config=None)),
    "what is off": (tiny("gpt2"), tiny("gpt2", add_cross_attention=False, is_encoder_decoder=False, pruned_heads={})),
    "bookkeeping": (tiny("llama"), tiny("llama", _name_or_path="x", torch_dtype="float16", bos_token_id=1, attention_dropout=0.0, id2label={})),
}  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_two_spellings_of_one_model(pair: tuple[Values, Values]) -> None:
    one, other = pair
    assert one != other
    assert describe(one) == describe(other)


def test_head_dim_is_not_always_a_share_of_the_hidden_size() -> None:
    attention = describe(published("GLM-4.5-Air")).attention
    assert isinstance(attention, Attention)
    assert (attention.num_heads * attention.head_dim, attention.num_kv_heads, attention.qkv_bias, attention.out_bias) == (
        12288,
        8,
        True,
        False,
    )
    plain = describe(tiny("gpt2")).attention
    assert isinstance(plain, Attention) and plain.head_dim == 6


def test_rope() -> None:
    def rope(name: str) -> Rope:
        positions = describe(published(name)).positions
        assert isinstance(positions, Rope)
        return positions

    assert rope("GLM-4.5-Air") == Rope(theta=1e6, rotary_dim=64)
    assert rope("GLM-4-9B-0414") == Rope(theta=1e4, rotary_dim=64, interleaved=True)
    assert rope("glm-4-9b-chat") == Rope(theta=5e6, rotary_dim=64, interleaved=True)
    assert rope("GPT-NeoX-20B") == Rope(theta=1e4, rotary_dim=24)
    assert rope("Llama-3.1-405B").scaling == BandScaling(
        factor=8, low_freq_factor=1, high_freq_factor=4, original_context_tokens=8192
    )
    assert rope("CodeLlama-70B-Instruct").theta == 1e4
    yarn = rope("DeepSeek-V3").scaling
    assert isinstance(yarn, YarnScaling) and (yarn.factor, yarn.original_context_tokens, yarn.mscale_all_dim) == (40, 4096, 1.0)
    untruncated = rope("gpt-oss-120b").scaling
    assert isinstance(untruncated, YarnScaling) and not untruncated.truncate
    assert rope("Evo2-40B").scaling == LinearScaling(factor=128)


def test_routers() -> None:
    def moe(name: str) -> MoE:
        found = describe(published(name)).experts
        assert found is not None
        return found

    big = moe("GLM-4.5")
    assert (big.num_experts, big.num_active, big.shared_intermediate_size) == (160, 8, 1536)
    assert (big.router.scoring, big.router.correction_bias, big.router.scale) == (Scoring.SIGMOID, True, 2.5)
    deep = moe("DeepSeek-V3").router
    assert (deep.num_groups, deep.num_chosen_groups, deep.renormalize) == (8, 4, True)
    assert (moe("Qwen3-30B-A3B").router.scoring, moe("Qwen3-30B-A3B").router.renormalize) == (Scoring.SOFTMAX, True)
    assert moe("Mixtral-8x7B").router.scoring is Scoring.SOFTMAX_OF_TOP
    clamped = moe("gpt-oss-120b")
    assert (clamped.activation, clamped.clamp, clamped.bias, clamped.router.bias) == (Activation.CLAMPED_SWIGLU, 7.0, True, True)


def test_layers_differ_where_they_should() -> None:
    air = describe(published("GLM-4.5")).layers
    assert [isinstance(layer.feed_forward, Dense) for layer in air[:4]] == [True, True, True, False]
    windows = [layer.mixer.window for layer in describe(published("gpt-oss-120b")).layers if isinstance(layer.mixer, Attention)]
    assert windows == [128, None] * 18
    own = [
        layer.mixer.indexer.own
        for layer in describe(published("GLM-5.2")).layers
        if isinstance(layer.mixer, LatentAttention) and layer.mixer.indexer
    ]
    assert (sum(own), len(own)) == (21, 78)
    mixed = [isinstance(layer.feed_forward, MoE) for layer in describe(tiny("qwen3_moe")).layers]
    assert mixed == [False, True, False, False]  # every second is a mixture, and the last is listed as dense


@pytest.mark.parametrize(
    ("name", "wiring"),
    [
        ("falcon-7b", Wiring.PARALLEL_ONE_NORM),
        ("falcon-11b", Wiring.PARALLEL_ONE_NORM),
        ("falcon-40b", Wiring.PARALLEL),
        ("falcon-rw", Wiring.PRE),
        ("gpt_neox", Wiring.PARALLEL),
        ("gpt_neox-sequential", Wiring.PRE),
        ("glm4", Wiring.SANDWICH),
        ("llama", Wiring.PRE),
    ],
)
def test_wiring(name: str, wiring: Wiring) -> None:
    assert {layer.wiring for layer in describe(tiny(name)).layers} == {wiring}


def test_positions_of_the_older_falcons() -> None:
    assert describe(tiny("falcon-rw")).positions == Alibi(before_scaling=True)
    todays = tiny("falcon-rw", rope_parameters={"rope_theta": 10000.0, "rope_type": "default"})
    assert describe(todays) == describe(tiny("falcon-rw"))


def test_native_schemes() -> None:
    assert describe(published("DeepSeek-V3")).native_scheme == "fp8"
    assert describe(published("gpt-oss-120b")).native_scheme == "mxfp4"
    assert describe(published("GLM-4.6")).native_scheme == "bf16"
    assert (
        describe(tiny("glm4_moe", quantization_config={"quant_method": "compressed-tensors"})).native_scheme
        == "compressed-tensors"
    )


def test_stop_tokens() -> None:
    assert describe(published("GLM-4.5-Air")).stop_token_ids == (151329, 151336, 151338)
    assert describe(tiny("llama", eos_token_id=2)).stop_token_ids == (2,)


def test_the_name_is_kept() -> None:
    assert describe(tiny("llama"), "mine").name == "mine"
    model = find("GLM-4.6")
    assert model is not None and spec_of(model).name == "GLM-4.6"


REFUSED: dict[str, tuple[Values, str]] = {
    "an unknown key": (tiny("llama", attn_logit_softcapping=50.0), "attn_logit_softcapping"),
    "a key of another family": (tiny("llama", n_shared_experts=1), "n_shared_experts"),
    "an unknown model": (tiny("llama", model_type="gemma9"), "gemma9"),
    "no model type": (tiny("llama", "model_type"), "model_type"),
    "a model type that is no text": (tiny("llama", model_type=["llama"]), "model_type"),
    "a missing key": (tiny("llama", "hidden_size"), "hidden_size"),
    "text for a number": (tiny("llama", hidden_size="24"), "hidden_size"),
    "a float for a count": (tiny("llama", num_hidden_layers=2.0), "num_hidden_layers"),
    "a flag for a count": (tiny("llama", num_hidden_layers=True), "num_hidden_layers"),
    "a number for a flag": (tiny("llama", attention_bias=1), "attention_bias"),
    "a negative size": (tiny("llama", vocab_size=-1), "vocab_size"),
    "an absurd size": (tiny("llama", intermediate_size=10**12), "intermediate_size"),
    "absurdly many layers": (tiny("llama", num_hidden_layers=10**6), "num_hidden_layers"),
    "an infinite theta": (tiny("llama", "rope_parameters", rope_theta=float("inf")), "rope_theta"),
    "a theta that is no number": (tiny("llama", "rope_parameters", rope_theta=float("nan")), "rope_theta"),
    "an unknown activation": (tiny("llama", hidden_act="relu2"), "hidden_act"),
    "dynamic rope": (tiny("llama", "rope_parameters", rope_scaling={"type": "dynamic", "factor": 2.0}), "dynamic"),
    "an unknown key inside rope": (tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "warp": 2}), "warp"),
    "two ropes": (tiny("llama", rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling"),
    "rope that is no object": (tiny("llama", "rope_parameters", rope_scaling="linear"), "rope_scaling"),
    "linear rope without a factor": (tiny("llama", "rope_parameters", rope_scaling={"type": "linear"}), "factor"),
    "an odd rotation": (tiny("glm4", rope_parameters={"partial_rotary_factor": 0.4}), "rotated"),
    "heads that KV heads do not divide": (tiny("llama", num_key_value_heads=4), "num_key_value_heads"),
    "more KV heads than heads": (tiny("llama", num_key_value_heads=12), "num_key_value_heads"),
    "hidden that heads do not divide": (tiny("llama", "head_dim", num_attention_heads=7, num_key_value_heads=7), "num_attention_heads"),
    "two names that disagree": (tiny("bloom", num_attention_heads=6), "num_attention_heads"),
    "weights in an unread format": (tiny("llama", quantization_config={"quant_method": "aqlm", "bits": 2}), "aqlm"),
    "weights in an unnamed format": (tiny("llama", quantization_config={"bits": 4}), "quant_method"),
    "more active experts than experts": (tiny("mixtral", num_experts_per_tok=4), "num_experts_per_tok"),
    "groups that do not divide": (tiny("glm4_moe", n_group=2), "n_group"),
    "another score": (tiny("deepseek_v3", scoring_func="softmax"), "scoring_func"),
    "another way to choose experts": (tiny("deepseek_v3", topk_method="group_limited_greedy"), "topk_method"),
    "an encoder to look at": (tiny("gpt2", add_cross_attention=True), "add_cross_attention"),
    "heads cut off": (tiny("gpt2", pruned_heads={"0": [1]}), "pruned_heads"),
    "layer lists that disagree": (tiny("glm4_moe", mlp_layer_types=["sparse", "sparse", "sparse"]), "mlp_layer_types"),
    "a layer list that is short": (tiny("glm4_moe", mlp_layer_types=["dense"]), "mlp_layer_types"),
    "a layer type that is unknown": (tiny("glm4_moe", "first_k_dense_replace", mlp_layer_types=["dense", "wet", "dense"]), "mlp_layer_types"),
    "no word on dense layers": (tiny("glm4_moe", "first_k_dense_replace"), "first_k_dense_replace"),
    "sliding windows of Qwen": (tiny("qwen3", use_sliding_window=True, sliding_window=16), "use_sliding_window"),
    "sliding layers of Qwen": (tiny("qwen3", layer_types=["full_attention", "sliding_attention"]), "layer_types"),
    "an indexer pattern": (tiny("glm_moe_dsa", "indexer_types", index_topk_pattern="FFSF"), "index_topk_pattern"),
    "indexers that begin with nothing to share": (tiny("glm_moe_dsa", indexer_types=["shared", "full", "full", "full"]), "indexer_types"),
    "layers without an indexer": (tiny("glm_moe_dsa", layer_types=["full_attention"] * 4), "layer_types"),
    "biases in latent attention": (tiny("deepseek_v3", attention_bias=True), "attention_bias"),
    "another swiglu": (tiny("gpt_oss", swiglu_alpha=2.0), "swiglu_alpha"),
    "a KV count that contradicts": (tiny("gpt_bigcode", num_key_value_heads=5), "num_key_value_heads"),
    "scores scaled by layer": (tiny("gpt2", scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
    "norms elsewhere": (tiny("bloom", apply_residual_connection_post_layernorm=True), "apply_residual_connection_post_layernorm"),
    "two next-token layers": (tiny("glm4_moe", num_nextn_predict_layers=2), "num_nextn_predict_layers"),
    "a layer that no list names": (tiny("evo2", hcs_layer_idxs=[]), "layer_idxs"),
    "no attention at all": (tiny("evo2", attn_layer_idxs=[], hcs_layer_idxs=[0, 3]), "attn_layer_idxs"),
}  # fmt: skip


@pytest.mark.parametrize(("values", "key"), REFUSED.values(), ids=REFUSED)
def test_refusals_name_the_key(values: Values, key: str) -> None:
    with pytest.raises(BadConfig) as caught:
        describe(values, where="there/config.json")
    message = str(caught.value)
    assert key in message
    assert message.startswith("there/config.json")
    assert "\n" not in message


@pytest.mark.parametrize("values", [None, [], "llama", 3, [{"model_type": "llama"}]])
def test_what_is_no_object_is_refused(values: object) -> None:
    with pytest.raises(BadConfig, match="object"):
        describe(values)
