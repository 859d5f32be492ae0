"""Names that transformers cannot check: models it does not have, and the multi-token-prediction layer that it leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from windlass.core.rule import ModelPart, Role, source_names, stored_tensors
from windlass.core.scheme import Keep
from windlass.model.families import Hints, describe, rules
from windlass.model.families.registry import known_models, spec_of

pytestmark = pytest.mark.pure

TINY = Path(__file__).parent / "tiny"
Shapes = dict[str, tuple[int, ...]]


def tiny(name: str, **changes: Any) -> dict[str, Any]:
    return json.loads((TINY / f"{name}.json").read_text()) | changes


def tensors(values: dict[str, Any], hints: Hints | None = None, choice: int = 0) -> Shapes:
    return {tensor.name: tensor.shape for tensor in stored_tensors(rules(describe(values, hints=hints)), choice)}


def test_chatglm() -> None:
    layer = {
        "input_layernorm.weight": (24,),
        "post_attention_layernorm.weight": (24,),
        "self_attention.query_key_value.weight": ((6 + 2 + 2) * 8, 24),
        "self_attention.query_key_value.bias": ((6 + 2 + 2) * 8,),
        "self_attention.dense.weight": (24, 48),
        "mlp.dense_h_to_4h.weight": (2 * 13, 24),
        "mlp.dense_4h_to_h.weight": (24, 13),
    }
    expected: Shapes = {
        "transformer.embedding.word_embeddings.weight": (101, 24),
        "transformer.encoder.final_layernorm.weight": (24,),
        "transformer.output_layer.weight": (101, 24),
    }
    expected |= {f"transformer.encoder.layers.{index}.{name}": shape for index in range(2) for name, shape in layer.items()}
    assert tensors(tiny("chatglm")) == expected


def test_evo2() -> None:
    found = tensors(tiny("evo2"))
    assert found["embedding_layer.weight"] == (64, 24)
    assert found["norm.scale"] == (24,)
    for index in range(4):
        assert found[f"blocks.{index}.mlp.l1.weight"] == found[f"blocks.{index}.mlp.l2.weight"] == (40, 24)
        assert found[f"blocks.{index}.mlp.l3.weight"] == (24, 40)
        assert found[f"blocks.{index}.pre_norm.scale"] == found[f"blocks.{index}.post_norm.scale"] == (24,)
    assert found["blocks.3.inner_mha_cls.Wqkv.weight"] == (72, 24)
    for index in range(3):
        assert found[f"blocks.{index}.projections.weight"] == (72, 24)
        assert f"blocks.{index}.inner_mha_cls.Wqkv.weight" not in found
    # Three short filters of 3 taps a channel; then 2 x 5 poles and residues and a skip term a channel (hcl), or 4 groups of taps.
    short = 3 * 24 * 3
    assert found["blocks.2.filter"] == (short + 24 * 11,)
    assert found["blocks.1.filter"] == (short + 4 * 16 + 24,)
    assert found["blocks.0.filter"] == (short + 4 * 7 + 24,)


NEXT_TOKEN = {"eh_proj.weight": (24, 48), "enorm.weight": (24,), "hnorm.weight": (24,), "shared_head.norm.weight": (24,)}
COPIES = {"embed_tokens.weight": (101, 24), "shared_head.head.weight": (101, 24)}


@pytest.mark.parametrize(
    ("name", "copies"), [("glm4_moe", True), ("deepseek_v3", True), ("glm4_moe_lite", True), ("glm_moe_dsa", False)]
)
def test_next_token_layer(name: str, copies: bool) -> None:
    """A full mixture layer at index num_layers and what joins it; GLM-5's shares the embedding and the head of the model."""
    without, with_layer = tensors(tiny(name)), tensors(tiny(name, num_nextn_predict_layers=1))
    layers = describe(tiny(name)).num_layers
    added = {key.removeprefix(f"model.layers.{layers}."): shape for key, shape in with_layer.items() if key not in without}
    assert with_layer.items() >= without.items()
    assert added.items() >= (NEXT_TOKEN | COPIES if copies else NEXT_TOKEN).items()
    assert copies or not COPIES.keys() & added.keys()
    last = {
        key.removeprefix(f"model.layers.{layers - 1}."): shape
        for key, shape in without.items()
        if key.startswith(f"model.layers.{layers - 1}.")
    }
    assert added.keys() - NEXT_TOKEN.keys() - COPIES.keys() == last.keys()
    assert all(added[key] == shape for key, shape in last.items())


def test_hints_overrule_the_config() -> None:
    claims = tiny("glm4_moe", num_nextn_predict_layers=1)
    absent = tensors(claims, Hints(next_token_layer=False))
    assert absent == tensors(tiny("glm4_moe"))
    slim = tensors(claims, Hints(next_token_layer=True, own_next_token_embeddings=False))
    assert "model.layers.3.eh_proj.weight" in slim
    assert "model.layers.3.embed_tokens.weight" not in slim


def test_glm_4_6_has_no_copies_and_4_7_has() -> None:
    names = {
        model.name: {t.name for t in stored_tensors(rules(spec_of(model)))}
        for model in known_models()
        if model.name.startswith("GLM-4.")
    }
    assert "model.layers.92.eh_proj.weight" in names["GLM-4.6"]
    assert "model.layers.92.embed_tokens.weight" not in names["GLM-4.6"]
    assert "model.layers.92.embed_tokens.weight" in names["GLM-4.7"]
    assert "model.layers.46.shared_head.head.weight" in names["GLM-4.5-Air"]
    assert "model.layers.0.self_attn.q_norm.weight" in names["GLM-4.5"]
    assert "model.layers.0.self_attn.q_norm.weight" not in names["GLM-4.5-Air"]


def test_a_head_that_is_tied_and_stored_all_the_same() -> None:
    for name in ("llama-tied", "gpt2", "bloom", "gpt_bigcode"):
        plain, copied = tensors(tiny(name), Hints(head_copy=False)), tensors(tiny(name), Hints(head_copy=True))
        assert copied.keys() - plain.keys() == {"lm_head.weight"}
        head = next(rule for rule in rules(describe(tiny(name), hints=Hints(head_copy=True))) if rule.role is Role.HEAD)
        assert head.copy_of == "embed.weight"
    assert "lm_head.weight" in tensors(tiny("falcon-40b"))
    assert "lm_head.weight" not in tensors(tiny("falcon-40b"), Hints(head_copy=False))
    untied = tensors(tiny("llama"), Hints(head_copy=True))
    assert untied == tensors(tiny("llama"))


@pytest.mark.parametrize("model", known_models(), ids=lambda model: model.name)
def test_rules_are_well_formed(model: Any) -> None:
    """No name is empty, none of ours twice, routers and norms are never packed, and a stacked source names no expert."""
    spec = spec_of(model)
    made = rules(spec)
    ours = [(rule.ours, rule.layers) for rule in made]
    assert len(set(ours)) == len(ours)
    for rule in made:
        layered = rule.layers is not None
        assert layered == ("{layer}" in rule.ours)
        assert (rule.num_experts > 0) == ("{expert}" in rule.ours)
        for source in rule.sources:
            assert ".." not in source.name and not source.name.endswith(".")
            assert layered == ("{layer}" in source.name)
            assert ("{expert}" in source.name) == (rule.num_experts > 0 and not source.stacked)
        if rule.role in (Role.LOOKUP, Role.HEAD, Role.VECTOR) or "router" in rule.ours:
            assert rule.keep in (Keep.HIGH, Keep.FLOAT32)
        if rule.part is ModelPart.NEXT_TOKEN:
            assert rule.layers == (spec.num_layers,)
    covered = sorted({layer for rule in made if rule.part is ModelPart.MAIN for layer in rule.layers or ()})
    assert covered == list(range(spec.num_layers))


def test_correction_bias_stays_in_32_bits() -> None:
    kept = {rule.ours for rule in rules(describe(tiny("glm4_moe"))) if rule.keep is Keep.FLOAT32}
    assert kept == {"layers.{layer}.ffn.router.correction"}


def test_source_names_say_which_layer_and_expert() -> None:
    made = rules(describe(tiny("mixtral")))
    down = next(rule for rule in made if rule.ours.endswith("down.weight"))
    listed = list(source_names(down, down.sources[0]))
    assert len(listed) == 2 * 3
    assert ("model.layers.1.block_sparse_moe.experts.2.w2.weight", 1, 2) in listed
    assert list(source_names(down, down.sources[1])) == [
        ("model.layers.0.mlp.experts.down_proj", 0, None),
        ("model.layers.1.mlp.experts.down_proj", 1, None),
    ]
