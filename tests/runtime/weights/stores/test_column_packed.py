"""AWQ and GPTQ files give the same tensors as the same codes in compressed-tensors' layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from windlass.errors import BadCheckpoint, Impossible
from windlass.runtime.weights.source import open_model
from windlass.runtime.weights.stores.column_packed import AWQ_ORDER, ColumnPackedStore, pack, unpack, unpack_awq
from windlass.runtime.weights.stores.memory import MemoryStore
from windlass.runtime.weights.tensors.packed import unpacked_rows

pytestmark = pytest.mark.cpu

OUT, IN, GROUP = 48, 64, 32


def drawn(seed: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [out, in], zeros and scales [out, groups]."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (OUT, IN), generator=generator)
    zeros = torch.full((OUT, IN // GROUP), 8) if symmetric else torch.randint(1, 16, (OUT, IN // GROUP), generator=generator)
    return codes, zeros, torch.rand(OUT, IN // GROUP, generator=generator).half() * 0.1


def awq_words(codes: torch.Tensor) -> torch.Tensor:
    """[n, out] as AWQ packs it: position p of a word holds output AWQ_ORDER[p]."""
    return pack(codes.unflatten(-1, (-1, 8))[..., list(AWQ_ORDER)].flatten(-2))


def stored(method: str, codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    if method == "awq":
        return {
            "qweight": awq_words(codes.T.contiguous()),
            "qzeros": awq_words(zeros.T.contiguous()),
            "scales": scales.T.contiguous(),
        }
    words = pack(codes.contiguous()).T.contiguous()
    index = torch.arange(IN, dtype=torch.int32) // GROUP
    return {"qweight": words, "qzeros": pack(zeros.T.contiguous() - 1), "scales": scales.T.contiguous(), "g_idx": index}


def section(method: str, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": method,
        "bits": 4,
        "group_size": GROUP,
        **({"zero_point": True} if method == "awq" else {"sym": False}),
        **more,
    }


@given(st.lists(st.integers(0, 15), min_size=8, max_size=64).map(lambda codes: codes[: len(codes) // 8 * 8]))
def test_packing_has_an_inverse(codes: list[int]) -> None:
    wanted = torch.tensor(codes).view(1, -1)
    assert torch.equal(unpack(pack(wanted)).long(), wanted)
    assert torch.equal(unpack_awq(awq_words(wanted)).long(), wanted)


@pytest.mark.parametrize(("method", "symmetric"), [("awq", False), ("gptq", False), ("gptq", True)])
def test_the_numbers_are_those_of_the_formula(method: str, symmetric: bool) -> None:
    codes, zeros, scales = drawn(1, symmetric)
    tensors = {f"a.{part}": value for part, value in stored(method, codes, zeros, scales).items()} | {
        "norm.weight": torch.ones(4)
    }
    store = ColumnPackedStore(MemoryStore(tensors, {}), section(method, sym=symmetric))
    assert ("a.weight_zero_point" in store.names()) != symmetric
    assert (
        store.shape("a.weight_packed") == (OUT, IN // 8) and "a.qweight" not in store.names() and "norm.weight" in store.names()
    )
    expected = (codes.view(OUT, -1, GROUP) - zeros.unsqueeze(-1)).float() * scales.float().unsqueeze(-1)
    assert torch.equal(unpacked_rows(store, "a.weight", IN)(0, OUT), expected.view(OUT, IN))
    assert torch.equal(unpacked_rows(store, "a.weight", IN)(8, 24), expected.view(OUT, IN)[8:24])


@pytest.mark.parametrize("more", [{"bits": 3}, {"desc_act": True}])
def test_what_is_not_supported_is_named(more: dict[str, Any]) -> None:
    with pytest.raises(Impossible, match="original weights"):
        ColumnPackedStore(MemoryStore({}, {}), section("gptq", **more))


def test_a_zero_point_that_does_not_fit() -> None:
    codes, zeros, scales = drawn(2, False)
    tensors = {f"a.{part}": value for part, value in stored("gptq", codes, zeros, scales).items()}
    tensors["a.qzeros"] = torch.full_like(tensors["a.qzeros"], -1)  # all nibbles 15, so all zeros 16
    store = ColumnPackedStore(MemoryStore(tensors, {}), section("gptq"))
    with pytest.raises(BadCheckpoint, match="zero point of 16"):
        store.read("a.weight_zero_point", 0, 1)


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_a_whole_model_is_opened(method: str, tmp_path: Path) -> None:
    """Attention and feed-forward are quantized, embeddings and norms are not: as the hub's checkpoints are."""
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 48, "max_position_embeddings": 64, "tie_word_embeddings": True,
        "quantization_config": section(method),
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": torch.randn(48, 64).half(), "model.norm.weight": torch.ones(64).half()}
    tensors |= {
        f"model.layers.0.{name}.weight": torch.ones(64).half() for name in ("input_layernorm", "post_attention_layernorm")
    }
    for seed, name in enumerate(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")):
        generator = torch.Generator().manual_seed(seed)
        codes, zeros = (torch.randint(1, 16, shape, generator=generator) for shape in ((64, 64), (64, 2)))
        parts = stored(method, codes, zeros, torch.rand(64, 2).half() * 0.1)
        where = "self_attn" if name[0] in "qkvo" else "mlp"
        tensors |= {f"model.layers.0.{where}.{name}.{part}": value for part, value in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened = open_model(tmp_path)
    assert opened.spec.num_layers == 1
    opened.store.close()
    from windlass.open.resolve import describe_path

    files = describe_path(tmp_path).files
    assert files is not None and files.scheme is not None
    assert (files.scheme.name, files.scheme.group, files.scheme.zero_points) == ("int4", 32, True)
