"""Bytes of a decoder's weights equal what the scheme says they take."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from windlass.core.layout import Layout
from windlass.core.scheme import scheme
from windlass.model.families import describe, rules
from windlass.runtime.nn import Decoder
from windlass.runtime.weights import RandomWeights
from windlass.tasks.bench.weight_bytes import weight_bytes
from windlass.tasks.plan.shards import ModelShards

pytestmark = pytest.mark.cpu

DENSE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 160,
    "max_position_embeddings": 64,
}
MIXTURE = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 160,
    "max_position_embeddings": 64,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("config", [DENSE, DENSE | {"tie_word_embeddings": True}, MIXTURE], ids=["dense", "tied", "mixture"])
@pytest.mark.parametrize("quant", ["int4", "bf16"])
def test_as_the_planner_counts(config: dict[str, Any], quant: str) -> None:
    spec = describe(config)
    made, how = rules(spec), scheme(quant, 32)
    decoder = Decoder(spec, RandomWeights(spec, made, quant=how))
    found = weight_bytes(decoder)
    shard = ModelShards(spec, made).shard(Layout(), how)
    assert found.experts == shard.experts[-1]
    # Norms and routers' inputs lie in fp32 here and in 16 bits in a file; tables of angles are in no file.
    always = shard.always[-1] + shard.head_bytes + (shard.embed_bytes if spec.tied_head else 0)
    assert found.always == pytest.approx(always, rel=0.05)
    lookup = 0 if spec.tied_head else shard.embed_bytes
    assert lookup <= found.lookup <= lookup + 64 * 64 * 4
