"""Every count of tests/data/params.json comes out of the published configs, to the last digit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from windlass.core.count import count_parameters
from windlass.core.model import Attention, LatentAttention, ModelSpec, kv_bytes_per_token
from windlass.errors import Impossible
from windlass.model.families import rules
from windlass.model.families.registry import beyond_reach, find, known_models, refuse_beyond_reach, spec_of

pytestmark = pytest.mark.pure

PARAMS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[2] / "data" / "params.json").read_text())
COUNTED = [hub for hub, row in PARAMS.items() if row["total_params_main"] is not None]

# Of the same shape, so of the same counts.
SAME_SHAPE = {
    "meta-llama/Llama-3.1-405B": "meta-llama/Llama-3.1-405B-Instruct",
    "THUDM/glm-4-9b-chat": "THUDM/glm-4-9b",
    "codellama/CodeLlama-70b-hf": "codellama/CodeLlama-70b-Instruct-hf",
}


def spec_at(hub: str) -> ModelSpec:
    model = find(hub)
    assert model is not None and model.hub == hub
    return spec_of(model)


def difference_in_active(hub: str, spec: ModelSpec) -> int:
    """What the table's active count has beyond ours. It counts weights touched per token, the head but not the input
    embedding; three kinds of row deviate from that."""
    if hub.startswith("Qwen/") and spec.experts:
        return spec.vocab_size * spec.hidden_size  # includes the input embedding
    if isinstance(spec.attention, LatentAttention):
        return -sum(moe.num_experts for moe in spec.moe_layers)  # leaves out the routers' correction biases
    if hub == "openai/gpt-oss-120b":
        return -spec.hidden_size  # leaves out the final norm
    return 0


@pytest.mark.parametrize("hub", COUNTED)
def test_parameters(hub: str) -> None:
    spec, row = spec_at(hub), PARAMS[hub]
    count = count_parameters(spec, rules(spec))
    assert count.total == row["total_params_main"]
    assert count.checkpoint == row["checkpoint_params"]
    assert 2 * count.checkpoint == row["bf16_weight_bytes"]
    assert count.active + difference_in_active(hub, spec) == row["active_params_per_token"]


@pytest.mark.parametrize("hub", PARAMS)
def test_shape_and_cache(hub: str) -> None:
    spec, row = spec_at(hub), PARAMS[hub]
    assert spec.num_layers == row["num_layers"]
    assert spec.attention.num_heads == row["num_heads"]
    if isinstance(spec.attention, Attention):
        assert (spec.attention.num_kv_heads, spec.attention.head_dim) == (row["num_kv_heads"], row["head_dim"])
    else:
        assert row["num_kv_heads"] is None
    assert kv_bytes_per_token(spec) == row["kv_bytes_per_token_bf16"]
    assert kv_bytes_per_token(spec, element_bytes=1) == row["kv_bytes_per_token_bf16"] // 2


def test_the_table_is_whole() -> None:
    assert len(COUNTED) == 35
    unlisted = {model.hub for model in known_models()} - set(PARAMS) - set(SAME_SHAPE)
    assert unlisted == {
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Llama-3.3-70B-Instruct",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "tiiuae/falcon-7b",
        "deepseek-ai/DeepSeek-R1",
        "deepseek-ai/DeepSeek-V3.1",
        *PUBLISHED_TOTALS,
    }


@pytest.mark.parametrize(("hub", "twin"), SAME_SHAPE.items())
def test_same_shape_same_counts(hub: str, twin: str) -> None:
    assert count_parameters(spec_at(hub), rules(spec_at(hub))).checkpoint == PARAMS[twin]["checkpoint_params"]


def test_published_totals_that_the_table_lacks() -> None:
    """Llama-3.1-8B 8,030,261,248 and SmolLM2-135M 134,515,008 (the hub's pages); Falcon-7B 7,217,189,760 with its stored head."""
    totals = {
        name: count_parameters(spec_at(name), rules(spec_at(name))) for name in ("meta-llama/Llama-3.1-8B", "tiiuae/falcon-7b")
    }
    assert totals["meta-llama/Llama-3.1-8B"].total == 8_030_261_248
    assert totals["tiiuae/falcon-7b"].checkpoint == 7_217_189_760
    small = spec_at("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert count_parameters(small, rules(small)).total == 134_515_008


PUBLISHED_TOTALS = {
    "moonshotai/Kimi-K2-Instruct": 1_026_408_232_448,
    "openai/gpt-oss-20b": 20_914_757_184,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "mistralai/Mistral-Small-24B-Base-2501": 23_572_403_200,
    "mistralai/Mistral-Large-Instruct-2407": 122_610_069_504,
}
"""Of the hub's pages. Their configs were put together from a sibling's and the published shape, so the total is what checks them."""


@pytest.mark.parametrize(("hub", "total"), PUBLISHED_TOTALS.items())
def test_totals_check_the_configs(hub: str, total: int) -> None:
    spec = spec_at(hub)
    assert count_parameters(spec, rules(spec)).total == total


@pytest.mark.parametrize("hub", ["deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3.1"])
def test_deepseeks_of_one_shape(hub: str) -> None:
    assert count_parameters(spec_at(hub), rules(spec_at(hub))).total == PARAMS["deepseek-ai/DeepSeek-V3"]["total_params_main"]


def test_models_beyond_reach_are_refused_by_name() -> None:
    """Each with a reason; none is in the registry as well."""
    for one in beyond_reach():
        assert len(one.why) > 20
        for name in one.names:
            assert find(name) is None
            with pytest.raises(Impossible, match="cannot be planned or run yet"):
                refuse_beyond_reach(name)


def test_evo2_is_near_its_name() -> None:
    spec = spec_at("arcinstitute/evo2_40b")
    assert count_parameters(spec, rules(spec)).total == pytest.approx(40e9, rel=0.05)
    assert spec.engines == ()


def test_next_token_layer_sizes() -> None:
    """3,616,573,568 parameters in GLM-4.5-Air's, of which 1,241,513,984 are copies of the embedding and the head."""
    spec = spec_at("zai-org/GLM-4.5-Air")
    count = count_parameters(spec, rules(spec))
    assert count.checkpoint - count.total == 3_616_573_568
    assert 2 * spec.vocab_size * spec.hidden_size == 1_241_513_984
    slim = spec_at("zai-org/GLM-4.6")
    full = spec_at("zai-org/GLM-4.7")
    assert count_parameters(full, rules(full)).checkpoint - count_parameters(slim, rules(slim)).checkpoint == 2 * 151552 * 5120
