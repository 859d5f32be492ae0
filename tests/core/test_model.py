"""The model's vocabulary: cache sizes, and values that survive JSON and cannot be changed."""

from __future__ import annotations

import msgspec
import pytest

from windlass.core.model import (
    Attention,
    Convolution,
    Indexer,
    LatentAttention,
    ModelSpec,
    kv_bytes_per_token,
    layer_cache_bytes,
)
from windlass.model.families.registry import find, known_models, spec_of

pytestmark = pytest.mark.pure

GROUPED = Attention(num_heads=8, num_kv_heads=2, head_dim=16)
LATENT = LatentAttention(num_heads=8, q_lora_rank=64, kv_lora_rank=32, nope_head_dim=16, rope_head_dim=8, v_head_dim=16)


def test_cache_of_a_layer() -> None:
    assert layer_cache_bytes(GROUPED, 100, 2, windowed=True) == 100 * 2 * 2 * 16 * 2
    assert layer_cache_bytes(LATENT, 100, 2, windowed=True) == 100 * (32 + 8) * 2
    assert layer_cache_bytes(LATENT, 100, 1, windowed=False) == 100 * 40
    assert layer_cache_bytes(LATENT, 100, 1, windowed=False, vector_bytes=1) == 100 * 41
    assert layer_cache_bytes(GROUPED, 100, 1, windowed=True, vector_bytes=1) == 100 * 2 * 2 * (16 + 1)


def test_a_window_is_dropped_only_by_an_engine_that_drops() -> None:
    windowed = msgspec.structs.replace(GROUPED, window=32)
    assert layer_cache_bytes(windowed, 100, 2, windowed=True) == layer_cache_bytes(GROUPED, 32, 2, windowed=True)
    assert layer_cache_bytes(windowed, 100, 2, windowed=False) == layer_cache_bytes(GROUPED, 100, 2, windowed=False)
    assert layer_cache_bytes(windowed, 10, 2, windowed=True) == layer_cache_bytes(GROUPED, 10, 2, windowed=True)


def test_an_indexer_keeps_a_key_where_it_chooses() -> None:
    index = Indexer(num_heads=4, head_dim=128, top_k=2048, own=True)
    own = msgspec.structs.replace(LATENT, indexer=index)
    shared = msgspec.structs.replace(LATENT, indexer=msgspec.structs.replace(index, own=False))
    assert layer_cache_bytes(own, 10, 2, windowed=False) - layer_cache_bytes(LATENT, 10, 2, windowed=False) == 10 * 128 * 2
    assert layer_cache_bytes(shared, 10, 2, windowed=False) == layer_cache_bytes(LATENT, 10, 2, windowed=False)


def test_a_convolution_keeps_the_same_whatever_the_context() -> None:
    mixer = Convolution(filter_elements=1, state_elements=100)
    assert layer_cache_bytes(mixer, 1, 2, windowed=False) == layer_cache_bytes(mixer, 10**6, 2, windowed=True) == 400


def test_cache_of_a_model_is_the_sum_of_its_layers() -> None:
    for model in known_models():
        spec = spec_of(model)
        no_index = sum(layer.mixer.kv_elements for layer in spec.layers)
        assert kv_bytes_per_token(spec, 2) == 2 * no_index
        assert kv_bytes_per_token(spec, 1) == no_index


def test_what_a_spec_is_made_of() -> None:
    model = find("GLM-4.5-Air")
    assert model is not None
    spec = spec_of(model)
    assert len(spec.moe_layers) == 45
    assert spec.experts is spec.moe_layers[0]
    assert spec.attention is spec.layers[0].mixer
    evo = find("Evo2-40B")
    assert evo is not None
    assert isinstance(spec_of(evo).layers[0].mixer, Convolution)
    assert isinstance(spec_of(evo).attention, Attention)


@pytest.mark.parametrize("model", known_models(), ids=lambda model: model.name)
def test_json_and_back(model: object) -> None:
    assert isinstance(model, type(known_models()[0]))
    spec = spec_of(model)
    assert msgspec.json.decode(msgspec.json.encode(spec), type=ModelSpec) == spec


def test_frozen_and_strict() -> None:
    with pytest.raises(AttributeError):
        GROUPED.num_heads = 4  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(msgspec.ValidationError, match="warp"):
        msgspec.json.decode(b'{"type":"attention","num_heads":1,"num_kv_heads":1,"head_dim":1,"warp":1}', type=Attention)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"type":"attention","num_heads":"1","num_kv_heads":1,"head_dim":1}', type=Attention)
