"""What a step must read and compute, against counts made by hand and against the planner's."""

from __future__ import annotations

import pytest

from windlass.core.count import count_parameters
from windlass.core.layout import Layout
from windlass.core.scheme import scheme
from windlass.model.families import describe, rules
from windlass.model.families.registry import find, spec_of
from windlass.tasks.bench.work import WeightBytes, decode_work, prefill_work
from windlass.tasks.plan.shards import ModelShards

pytestmark = pytest.mark.cpu

DENSE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


def test_a_dense_step_by_hand() -> None:
    spec = describe(DENSE)
    layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128
    work = decode_work(spec, rules(spec), WeightBytes(always=1000, lookup=50), batch=3, context_tokens=10, kv="bf16")
    assert work.weight_bytes == 1000
    assert work.kv_bytes == 3 * 2 * 10 * (2 * 2 * 16) * 2  # sequences, layers, tokens, keys and values of two heads of 16, bytes
    assert work.flops == 3 * (2 * 2 * layer + 2 * 2 * 2 * 64 * 10 + 2 * 64 * 100)
    assert work.read_bytes == work.weight_bytes + work.kv_bytes


def test_a_prefill_by_hand() -> None:
    spec = describe(DENSE)
    layer = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 128
    work = prefill_work(spec, rules(spec), WeightBytes(always=1000), prompts=2, prompt_tokens=8, num_steps=1)
    assert work.weight_bytes == 1000 and work.kv_bytes == 0
    assert work.flops == 16 * (2 * 2 * layer + 2 * 2 * 2 * 64 * 4) + 2 * 2 * 64 * 100
    twice = prefill_work(spec, rules(spec), WeightBytes(always=1000), prompts=2, prompt_tokens=8, num_steps=2)
    assert twice.weight_bytes == 2000 and twice.flops == work.flops


@pytest.mark.parametrize("batch", [1, 8, 64])
def test_experts_as_the_planner_counts_them(batch: int) -> None:
    known = find("GLM-4.5-Air")
    assert known is not None
    spec = spec_of(known)
    made, how = rules(spec), scheme("int4")
    shard = ModelShards(spec, made).shard(Layout(), how)
    weights = WeightBytes(
        always=int(shard.always[-1] + shard.head_bytes), experts=int(shard.experts[-1]), lookup=int(shard.embed_bytes)
    )
    work = decode_work(spec, made, weights, batch, 192, "bf16")
    expected = {1: 7.5e9, 8: 24.9e9, 64: 55e9}[batch]  # measured elsewhere for this model at 4 bits
    assert work.weight_bytes == pytest.approx(expected, rel=0.03)
    assert weights.total == pytest.approx(count_parameters(spec, made).total * 0.5, rel=0.1)


def test_a_window_bounds_what_is_read() -> None:
    known = find("gpt-oss-120b")
    assert known is not None
    spec = spec_of(known)
    near = decode_work(spec, rules(spec), WeightBytes(always=0), 1, 4096, "bf16").kv_bytes
    far = decode_work(spec, rules(spec), WeightBytes(always=0), 1, 8192, "bf16").kv_bytes
    assert near < far < 2 * near
