"""Parameters and floating-point operations, against formulas from papers and sums by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.core.count import (
    count_parameters,
    distinct_experts,
    forward_flops,
    matrix_flops,
    mixer_flops,
    next_token_flops,
    training_flops,
)
from windlass.core.model import Attention, Indexer, LatentAttention, ModelSpec
from windlass.core.rule import ModelPart, Role
from windlass.model.families import describe, rules
from windlass.model.families.registry import find, spec_of

pytestmark = pytest.mark.pure


def known(name: str) -> ModelSpec:
    model = find(name)
    assert model is not None
    return spec_of(model)


def gpt(layers: int, hidden: int, heads: int, vocab: int, tied: bool = True) -> ModelSpec:
    return describe(
        {"model_type": "gpt2", "vocab_size": vocab, "n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 2048}
        | {"tie_word_embeddings": tied}
    )


@given(st.integers(1, 20), st.integers(1, 8), st.integers(1, 8), st.integers(1, 5000), st.integers(1, 4096))
def test_training_flops_of_a_gpt(layers: int, heads: int, per_head: int, vocab: int, tokens: int) -> None:
    """96 s L h^2 (1 + s/6h + V/16Lh) a sequence with everything recomputed (arXiv 2104.04473, appendix); 72 without."""
    hidden = heads * per_head
    spec = gpt(layers, hidden, heads, vocab)
    forward = forward_flops(spec, rules(spec), tokens)
    full = training_flops(forward, "full")
    paper = 96 * layers * hidden**2 * (1 + tokens / (6 * hidden) + vocab / (16 * layers * hidden))
    assert full.hardware == pytest.approx(paper)
    assert full.model == pytest.approx(72 * layers * hidden**2 * (1 + tokens / (6 * hidden) + vocab / (12 * layers * hidden)))
    assert training_flops(forward, "none").hardware == full.model
    assert training_flops(forward, "selective").hardware == pytest.approx(full.model + 4 * hidden * tokens * layers)


def test_parameters_of_a_gpt() -> None:
    """12 L h^2 in matrices, 13 L h in biases and norms, and the tables: GPT-2's own 124,439,808."""
    spec = describe({"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024})
    count = count_parameters(spec, rules(spec))
    assert count.total == 124_439_808
    assert count.embedding == (50257 + 1024) * 768
    assert count.active == count.checkpoint == count.total


def test_untying_adds_a_head() -> None:
    tied, untied = gpt(2, 8, 2, 100), gpt(2, 8, 2, 100, tied=False)
    assert count_parameters(untied, rules(untied)).total - count_parameters(tied, rules(tied)).total == 800
    assert forward_flops(tied, rules(tied), 1).head == forward_flops(untied, rules(untied), 1).head == 1600


def test_a_mixture_computes_with_its_active_experts_only() -> None:
    spec = known("Mixtral-8x7B")
    layer = 2 * 4096 * (4096 + 1024) + 8 * 4096 + 2 * 3 * 4096 * 14336  # q, o, k, v; router; two experts
    assert matrix_flops(rules(spec)) == 2 * 32 * layer
    assert forward_flops(spec, rules(spec), 0).total == 2 * (32 * layer + 4096 * 32000)


def test_forward_is_about_twice_the_active_parameters() -> None:
    """What is counted as active is what is multiplied, apart from norms, biases and the like."""
    for name in ("GLM-4.5-Air", "Qwen3-30B-A3B", "DeepSeek-V3", "Mixtral-8x22B"):
        spec = known(name)
        active = count_parameters(spec, rules(spec)).active
        assert forward_flops(spec, rules(spec), 0).total == pytest.approx(2 * active, rel=1e-3)


def test_next_token_layer_costs_a_layer_and_a_head() -> None:
    spec = known("GLM-4.5-Air")
    extra = next_token_flops(spec, rules(spec), 1000)
    assert extra.head == 2 * 4096 * 151552
    assert extra.attention == 2.0 * 2 * 96 * 128 * 1000
    sparse = [rule for rule in rules(spec) if rule.part is ModelPart.NEXT_TOKEN and rule.role is Role.MATRIX]
    assert sum("next.project" in rule.ours for rule in sparse) == 1
    attention = 4096 * 128 * (96 + 8 + 8 + 96)
    experts = 3 * 4096 * 1408 * (8 + 1) + 128 * 4096
    assert extra.layers == 2 * (attention + experts + 2 * 4096 * 4096)
    assert next_token_flops(known("INTELLECT-3"), rules(known("INTELLECT-3")), 1000).total == 0


def test_a_window_caps_what_is_seen() -> None:
    plain = Attention(num_heads=4, num_kv_heads=2, head_dim=8)
    windowed = Attention(num_heads=4, num_kv_heads=2, head_dim=8, window=128)
    assert mixer_flops(plain, 1000) == 4 * 4 * 8 * 1000
    assert mixer_flops(windowed, 1000) == mixer_flops(plain, 128)
    assert mixer_flops(windowed, 100) == mixer_flops(plain, 100)


def test_an_indexer_looks_at_all_and_attention_at_its_choice() -> None:
    shape = {"num_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 32, "nope_head_dim": 8, "rope_head_dim": 4, "v_head_dim": 6}
    plain = LatentAttention(**shape)
    own = LatentAttention(**shape, indexer=Indexer(num_heads=2, head_dim=8, top_k=64, own=True))
    shared = LatentAttention(**shape, indexer=Indexer(num_heads=2, head_dim=8, top_k=64, own=False))
    assert mixer_flops(plain, 1000) == 2 * 4 * (8 + 4 + 6) * 1000
    assert mixer_flops(shared, 1000) == mixer_flops(plain, 64)
    assert mixer_flops(own, 1000) == mixer_flops(plain, 64) + 2 * 2 * 8 * 1000


def test_distinct_experts() -> None:
    moe = known("GLM-4.5-Air").experts
    assert moe is not None
    assert distinct_experts(moe, 1) == pytest.approx(8)
    assert distinct_experts(moe, 2) == pytest.approx(8 + 8 * 120 / 128)
    assert distinct_experts(moe, 10_000) == pytest.approx(128)


def test_active_parameters_of_a_tied_mixture_keep_the_table() -> None:
    """A tied table is the head as well, and all of it is multiplied."""
    values = {"model_type": "mixtral", "vocab_size": 100, "hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    values |= {
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "max_position_embeddings": 64,
    }
    tied, untied = describe(values | {"tie_word_embeddings": True}), describe(values)
    expected = (
        800 + 8 + (2 * 8 + 8 * (8 + 4 + 4 + 8) + 4 * 8 + 3 * 8 * 16)
    )  # head; final norm; norms, attention, router, one expert
    assert count_parameters(tied, rules(tied)).active == expected
    assert count_parameters(untied, rules(untied)).active == expected
    assert count_parameters(untied, rules(untied)).total - count_parameters(tied, rules(tied)).total == 800
