"""Whole GGUF files as checkpoints: the real SmolLM2, and small ones of every architecture, written with ggml's own package."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from windlass.core.rule import stored_tensors
from windlass.errors import BadInput
from windlass.model import families
from windlass.model.families.registry import find, published_config, spec_of
from windlass.model.formats.gguf.file import GgufFile
from windlass.runtime.weights.stores.gguf import GgufStore

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are small, and tests run side by side: a second thread would only wait for a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- the real file


def test_smollm2_is_the_published_model(smollm2: Path) -> None:
    store = GgufStore(smollm2)
    spec = families.describe(store.config, "SmolLM2-135M-Instruct", hints=families.hints_from(store.names(), 30))
    known = find("SmolLM2-135M-Instruct")
    assert known is not None
    assert spec == spec_of(known)
    assert {(tensor.name, tensor.shape) for tensor in stored_tensors(families.rules(spec))} == {
        (name, store.shape(name)) for name in store.names()
    }
    store.close()


SCRIPT = Path(__file__).parents[3] / "data" / "make_smollm2_golden.py"


def script() -> Any:
    found = importlib.util.spec_from_file_location("make_smollm2_golden", SCRIPT)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def check_smollm2(smollm2: Path, expected: dict[str, str]) -> None:
    store, making = GgufStore(smollm2), script()
    assert set(expected) - set(store.names()) == {"lm_head.weight"}  # tied
    found = {name: making.numbers_digest(store.read(name, 0, store.shape(name)[0])) for name in store.names()}
    unequal = [name for name in found if found[name] != expected[name]]
    assert (len(store.names()), unequal) == (272, [])
    store.close()


def test_smollm2_weights_equal_transformers(smollm2: Path) -> None:
    """As it reads them: tests/data/smollm2_golden.json has their digests."""
    making = script()
    kept = json.loads(making.GOLDEN.read_text())
    if making.digest(smollm2) != kept["sha256"]:
        pytest.skip(f"{making.GOLDEN.name} was made of another {kept['file']}; run tests/data/{SCRIPT.name} {smollm2}")
    check_smollm2(smollm2, kept["weights"])


@pytest.mark.long
def test_transformers_still_reads_them_so(smollm2: Path) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    making = script()
    check_smollm2(smollm2, {name: making.numbers_digest(tensor) for name, tensor in making.load(smollm2).state_dict().items()})


# --- small files of every architecture

SMALL: dict[str, tuple[str, str, dict[str, int]]] = {
    # GGUF's name -> a model of the registry, ggml's name, the registry's config made small
    "llama": ("Llama-3.1-70B", "LLAMA", {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}),
    "qwen3": ("Qwen3-8B", "QWEN3", {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 32}),
    "qwen3moe": ("Qwen3-30B-A3B", "QWEN3MOE", {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 4, "head_dim": 32}),
    "glm4moe": (
        "GLM-4.5-Air",
        "GLM4_MOE",
        {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 4, "head_dim": 32},
    ),
}


def small_config(name: str) -> dict[str, Any]:
    known = find(SMALL[name][0])
    assert known is not None
    config = published_config(known) | SMALL[name][2]
    config |= {"num_hidden_layers": 2, "vocab_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return config | ({"num_experts_per_tok": 2} if "num_experts_per_tok" in config else {})


def expected_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """A checkpoint of that config, random, under its Hugging Face names."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tensor.name, tensor.shape) for tensor in stored_tensors(families.rules(families.describe(config)))]
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes}


def permuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """As llama.cpp's convert_hf_to_gguf.py stores Q and K of its `llama`."""
    return weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def stored_form(name: str, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as a GGUF file has them: renamed by the gguf package, experts stacked, Q and K permuted."""
    gguf = pytest.importorskip("gguf")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[SMALL[name][1]], config["num_hidden_layers"] + 1)
    found: dict[str, torch.Tensor] = {}
    stacks: dict[str, list[torch.Tensor]] = {}
    for tensor_name, tensor in tensors.items():
        if name == "llama" and "q_proj" in tensor_name:
            tensor = permuted(tensor, config["num_attention_heads"])
        if name == "llama" and "k_proj" in tensor_name:
            tensor = permuted(tensor, config["num_key_value_heads"])
        if ".mlp.experts." in tensor_name:
            before, _, after = tensor_name.partition(".experts.")
            stacks.setdefault(f"{before}.experts.{after.partition('.')[2]}", []).append(tensor)
        else:
            tensor_name = tensor_name.replace("e_score_correction_bias", "e_score_correction.bias")
            found[names.get_name(tensor_name, try_suffixes=(".weight", ".bias"))] = tensor
    for tensor_name, tensors_of_layer in stacks.items():
        found[names.get_name(tensor_name, try_suffixes=(".weight",))] = torch.stack(tensors_of_layer)
    return found


def metadata_of(name: str, config: dict[str, Any]) -> dict[str, Any]:
    found = {
        "block_count": config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0),
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(config["rope_theta"]),
        "rope.dimension_count": int(config["head_dim"] * config.get("partial_rotary_factor", 1.0)),
        "vocab_size": config["vocab_size"],
    }
    if "moe_intermediate_size" in config:
        found |= {
            "expert_count": config.get("num_experts", config.get("n_routed_experts")),
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    if name == "glm4moe":
        found |= {
            "expert_gating_func": 2,
            "expert_shared_count": config["n_shared_experts"],
            "expert_weights_scale": float(config["routed_scaling_factor"]),
            "expert_weights_norm": config["norm_topk_prob"],
            "leading_dense_block_count": config["first_k_dense_replace"],
            "nextn_predict_layers": config["num_nextn_predict_layers"],
        }
    return found


Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def write_gguf(
    file: Path,
    name: str,
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    change: Change | None = None,
    kind: str = "F32",
) -> Path:
    gguf = pytest.importorskip("gguf")
    metadata, stored = metadata_of(name, config), stored_form(name, config, tensors)
    if change is not None:
        change(metadata, stored)
    writer = gguf.GGUFWriter(file, name)
    for key, value in metadata.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key if key.startswith(("tokenizer.", "split.")) else f"{name}.{key}", value)
    for tensor_name, tensor in stored.items():
        quantize = kind != "F32" and tensor.dim() > 1 and tensor.shape[-1] % 32 == 0
        type_ = gguf.GGMLQuantizationType[kind if quantize else "F32"]
        writer.add_tensor(tensor_name, gguf.quantize(tensor.numpy(), type_), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("name", SMALL)
def test_every_architecture_reads_back(tmp_path: Path, name: str) -> None:
    config = small_config(name)
    tensors = expected_tensors(config)
    scaling = config.pop("rope_scaling", None)
    store = GgufStore(write_gguf(tmp_path / "model.gguf", name, config, tensors))
    assert set(store.names()) == set(tensors)
    for tensor_name, tensor in tensors.items():
        assert store.shape(tensor_name) == tuple(tensor.shape)
        assert torch.equal(store.read(tensor_name, 0, tensor.shape[0]), tensor), tensor_name
        assert torch.equal(store.read(tensor_name, 3, tensor.shape[0] - 1), tensor[3:-1]), tensor_name
    config["eos_token_id"] = []  # the small files have no vocabulary
    hints = families.hints_from(store.names(), config["num_hidden_layers"])
    assert families.describe(store.config, hints=hints) == families.describe(config)
    assert scaling is None or name == "llama"
    store.close()


def test_the_llama_permutation_moves_rows_within_heads(tmp_path: Path) -> None:
    config = small_config("llama")
    tensors = expected_tensors(config)
    file = write_gguf(tmp_path / "model.gguf", "llama", config, tensors)
    stored = GgufFile(file).read("blk.0.attn_q.weight", 0, 64)
    assert not torch.equal(stored, tensors["model.layers.0.self_attn.q_proj.weight"])


def test_frequency_tables_of_llama_3_are_understood(tmp_path: Path) -> None:
    """A file has the table; the config has the numbers it was made from (transformers makes the table here)."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = small_config("llama")
    inverse, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**copy.deepcopy(config)), device="cpu")
    plain = 1.0 / config["rope_theta"] ** (torch.arange(0, 16, 2) / 16)
    table = plain / inverse

    def with_table(metadata: dict[str, Any], stored: dict[str, torch.Tensor]) -> None:
        stored["rope_freqs.weight"] = table

    store = GgufStore(write_gguf(tmp_path / "model.gguf", "llama", config, expected_tensors(config), with_table))
    assert store.config["rope_scaling"] == config["rope_scaling"]
    assert "rope_freqs.weight" not in store.names()

    def with_another(metadata: dict[str, Any], stored: dict[str, torch.Tensor]) -> None:
        stored["rope_freqs.weight"] = table * torch.linspace(1, 2, 8)

    with pytest.raises(BadInput, match="frequency scaling"):
        GgufStore(write_gguf(tmp_path / "other.gguf", "llama", config, expected_tensors(config), with_another))


def test_a_tied_head_is_seen_by_its_absence(tmp_path: Path) -> None:
    def without_head(metadata: dict[str, Any], stored: dict[str, torch.Tensor]) -> None:
        del stored["output.weight"]

    config = small_config("qwen3")
    store = GgufStore(write_gguf(tmp_path / "model.gguf", "qwen3", config, expected_tensors(config), without_head))
    assert store.config["tie_word_embeddings"] is True


def test_a_claimed_mtp_layer_that_is_not_there_is_dropped(tmp_path: Path) -> None:
    def without_layer(metadata: dict[str, Any], stored: dict[str, torch.Tensor]) -> None:
        for key in [key for key in stored if key.startswith("blk.2.")]:
            del stored[key]

    config = small_config("glm4moe")
    store = GgufStore(write_gguf(tmp_path / "model.gguf", "glm4moe", config, expected_tensors(config), without_layer))
    assert (store.config["num_hidden_layers"], store.config["num_nextn_predict_layers"]) == (2, 0)


def test_three_stop_tokens_are_kept(tmp_path: Path) -> None:
    def with_stops(metadata: dict[str, Any], stored: dict[str, torch.Tensor]) -> None:
        metadata |= {"tokenizer.ggml.eos_token_id": 90, "tokenizer.ggml.eot_token_id": 91, "tokenizer.ggml.eom_token_id": 92}

    config = small_config("glm4moe")
    store = GgufStore(write_gguf(tmp_path / "model.gguf", "glm4moe", config, expected_tensors(config), with_stops))
    assert families.describe(store.config).stop_token_ids == (90, 91, 92)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("name", ["llama", "glm4moe"])
def test_raw_blocks_are_the_rows_that_are_read(tmp_path: Path, name: str, kind: str) -> None:
    """Codes in the order of the Hugging Face rows: quantizing that tensor gives the same bytes."""
    gguf = pytest.importorskip("gguf")
    config = small_config(name)
    tensors = expected_tensors(config)
    store = GgufStore(write_gguf(tmp_path / "model.gguf", name, config, tensors, kind=kind))
    checked = 0
    for tensor_name, tensor in tensors.items():
        if tensor.dim() == 2 and tensor.shape[1] % 32 == 0:
            type_name, blocks = store.raw_blocks(tensor_name, 1, tensor.shape[0] - 1)
            expected = gguf.quantize(tensor[1:-1].numpy(), gguf.GGMLQuantizationType[kind])
            assert (type_name, bytes(blocks)) == (kind, expected.tobytes()), tensor_name
            checked += 1
    assert checked >= 10
    store.close()


def test_split_files_are_one_checkpoint(tmp_path: Path) -> None:
    config = small_config("qwen3")
    tensors = expected_tensors(config)
    parts = [tmp_path / f"model-0000{number}-of-00002.gguf" for number in (1, 2)]
    for number, part in enumerate(parts):

        def half(metadata: dict[str, Any], stored: dict[str, torch.Tensor], number: int = number) -> None:
            metadata["split.tensors.count"] = len(stored)
            for key in sorted(stored)[number::2]:
                del stored[key]

        write_gguf(part, "qwen3", config, tensors, half)
    store = GgufStore(parts[0])
    assert all(torch.equal(store.read(name, 0, tensor.shape[0]), tensor) for name, tensor in tensors.items())
    parts[1].unlink()
    with pytest.raises(BadInput, match="00002-of-00002"):
        GgufStore(parts[0])


# --- refusals


def refused(directory: Path, name: str, change: Change) -> str:
    config = small_config(name)
    with pytest.raises(BadInput) as caught:
        GgufStore(write_gguf(directory / "model.gguf", name, config, expected_tensors(config), change))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    assert "blk.0.attn_sinks" in refused(
        tmp_path, "llama", lambda _, stored: stored.update({"blk.0.attn_sinks.weight": torch.ones(4)})
    )


def test_an_unknown_key_is_refused(tmp_path: Path) -> None:
    assert "attention.scale" in refused(tmp_path, "llama", lambda metadata, _: metadata.update({"attention.scale": 0.5}))


def test_a_mixture_under_llama_is_refused(tmp_path: Path) -> None:
    assert "Mixtral" in refused(tmp_path, "llama", lambda metadata, _: metadata.update({"expert_count": 8}))


def test_another_router_is_refused(tmp_path: Path) -> None:
    assert "expert_gating_func" in refused(tmp_path, "glm4moe", lambda metadata, _: metadata.update({"expert_gating_func": 1}))


def test_a_key_of_the_wrong_type_is_refused(tmp_path: Path) -> None:
    assert "block_count" in refused(tmp_path, "qwen3", lambda metadata, _: metadata.update({"block_count": "two"}))


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(BadInput, match=r"'mamba' is not supported.*llama"):
        GgufStore(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["llama", "glm4moe"])
def test_mutated_files_are_read_or_refused(tmp_path: Path, name: str) -> None:
    config = small_config(name)
    sound = write_gguf(tmp_path / "sound.gguf", name, config, expected_tensors(config)).read_bytes()
    header = len(sound) - sum(tensor.numel() * 4 for tensor in expected_tensors(config).values())
    chance, opened = random.Random(1), 0
    for _ in range(300):
        content = bytearray(sound)
        for _ in range(chance.choice([1, 1, 3])):
            content[chance.randrange(header)] = chance.choice([0, 1, 0xFF, chance.randrange(256)])
        (tmp_path / "model.gguf").write_bytes(content)
        try:
            store = GgufStore(tmp_path / "model.gguf")
        except BadInput as error:
            assert "\n" not in str(error)
            continue
        opened += 1
        for tensor in store.names():
            store.read(tensor, 0, store.shape(tensor)[0])
        store.close()
    assert 0 < opened < 300


def test_a_file_cut_after_opening_is_named(tmp_path: Path) -> None:
    config = small_config("qwen3")
    file = write_gguf(tmp_path / "model.gguf", "qwen3", config, expected_tensors(config))
    store = GgufStore(file)
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(BadInput, match="ends at byte"):
        for name in store.names():
            store.read(name, 0, store.shape(name)[0])
