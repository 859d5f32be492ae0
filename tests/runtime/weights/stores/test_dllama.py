"""`.m` files written and read back: every architecture, every weight type, and the bytes of Distributed Llama's own converter."""

from __future__ import annotations

import importlib.util
import io
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from windlass.core.model import ModelSpec
from windlass.core.rule import stored_tensors
from windlass.errors import BadCheckpoint, BadConfig, BadInput, Error, Impossible, UnknownName
from windlass.model.families import describe, rules
from windlass.model.formats.dllama.file import KEYS, header_bytes, read_header
from windlass.runtime.weights.stores.dllama import DllamaStore
from windlass.tasks.convert.dllama.writer import WrittenModel, file_bytes, write_model

pytestmark = pytest.mark.cpu

_module = importlib.util.spec_from_file_location(
    "dllama_reference", Path(__file__).parents[4] / "bench" / "convert" / "dllama_reference.py"
)
assert _module is not None and _module.loader is not None
reference = importlib.util.module_from_spec(_module)
_module.loader.exec_module(reference)

_SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "num_hidden_layers": 3,
    "intermediate_size": 160,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
}
_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_SHAPE},
    "llama-bands": {"model_type": "llama", **_SHAPE, "rope_scaling": _SCALING},
    "llama-tied": {"model_type": "llama", **_SHAPE, "tie_word_embeddings": True, "hidden_act": "gelu"},
    "mistral": {"model_type": "mistral", **_SHAPE, "sliding_window": 128},
    "qwen3": {"model_type": "qwen3", **_SHAPE, "rms_norm_eps": 1e-6},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **_SHAPE,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        **_SHAPE,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
        "norm_topk_prob": False,
        "n_group": 2,
        "topk_group": 1,
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "num_nextn_predict_layers": 1,
    },
    "glm4_moe-air": {
        "model_type": "glm4_moe",
        **_SHAPE,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 0,
        "attention_bias": False,
        "use_qk_norm": False,
        "partial_rotary_factor": 0.25,
    },
}
TYPES = ("f32", "f16", "q80", "q40")


def _tensors(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    shapes = {tensor.name: tensor.shape for tensor in stored_tensors(rules(describe(config)))}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _reader(tensors: dict[str, torch.Tensor]) -> Callable[[str, int, int], torch.Tensor]:
    return lambda name, start, stop: tensors[name][start:stop]


def _write(path: Path, config: dict[str, Any], weights: str, **options: Any) -> tuple[dict[str, torch.Tensor], WrittenModel]:
    tensors = _tensors(config)
    return tensors, write_model(path, config, _reader(tensors), weights, **options)


def _read_all(store: DllamaStore, name: str) -> torch.Tensor:
    return store.read(name, 0, store.shape(name)[0])


def _comparable(spec: ModelSpec) -> ModelSpec:
    """What a file keeps: not the name, the MTP layer, a tied head, nor a window beyond the context."""
    layers = tuple(
        msgspec.structs.replace(layer, mixer=msgspec.structs.replace(layer.mixer, window=None)) for layer in spec.layers
    )
    return msgspec.structs.replace(spec, name="", family="", next_token=None, tied_head=False, context_tokens=0, layers=layers)


@pytest.mark.parametrize("weights", TYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_written_and_read_back(tmp_path: Path, name: str, weights: str) -> None:
    config, path = CONFIGS[name], tmp_path / "model.m"
    tensors, written = _write(path, config, weights, slice_elements=1024)
    assert path.stat().st_size == written.num_bytes == file_bytes(config, weights)
    assert [found.name for found in tmp_path.iterdir()] == ["model.m"]
    with DllamaStore(path) as store:
        assert _comparable(store.spec) == _comparable(describe(config))
        kept = {name for name in tensors if not name.startswith("model.layers.3.")} | {"lm_head.weight"}
        assert set(store.names()) == kept
        for tensor in kept:
            original = tensors.get(tensor, tensors["model.embed_tokens.weight"])
            assert store.shape(tensor) == tuple(original.shape)
            _compare(_read_all(store, tensor), original, weights if _is_matrix(tensor) else "f32")


def _is_matrix(name: str) -> bool:
    return "_proj.weight" in name or name == "lm_head.weight"


def _compare(back: torch.Tensor, original: torch.Tensor, weights: str) -> None:
    if weights in ("f32", "f16"):
        assert torch.equal(back, original.to(getattr(torch, {"f32": "float32", "f16": "float16"}[weights])))
        return
    file = io.BytesIO()
    reference.write_tensor(file, original, weights)  # the rows' blocks, whatever the order in the file
    size = {"q40": 18, "q80": 34}[weights]
    for index, block in enumerate(back.reshape(-1, 32)):
        assert torch.equal(block, _dequantized(file.getvalue()[index * size : (index + 1) * size]))


def _dequantized(block: bytes) -> torch.Tensor:
    (scale,) = struct.unpack("<e", block[:2])
    if len(block) == 34:
        codes = torch.tensor(struct.unpack("<32b", block[2:]))
    else:
        codes = torch.tensor([byte & 15 for byte in block[2:]] + [byte >> 4 for byte in block[2:]]) - 8
    return codes.float() * torch.tensor(scale, dtype=torch.float32)


# --- the bytes of Distributed Llama's converter ----------------------------------------------------------------------


def _converter_pairs(config: dict[str, Any], arch: int, weights: str) -> list[tuple[int, int]]:
    """The header of converter/convert-hf.py, in its order."""
    pairs = [
        (0, 0),
        (1, arch),
        (11, 1),
        (2, 64),
        (3, 160),
        (4, 3),
        (5, 6),
        (6, 2),
        (13, reference.TYPES[weights]),
        (10, 256),
        (9, 96),
    ]
    pairs += [(7, 0), (8, 0), (12, 500000)]
    pairs += [(14, 8), (15, 1), (16, 4), (17, 64), (18, 2)] if "rope_scaling" in config else []
    return [*pairs, (19, 32), (20, {1e-5: 5, 1e-6: 6}[config["rms_norm_eps"]])]


@pytest.mark.parametrize("weights", TYPES)
@pytest.mark.parametrize(("name", "arch"), [("llama", 0xABCD00), ("llama-bands", 0xABCD00), ("qwen3", 0xABCD01)])
def test_the_file_equals_the_converters(tmp_path: Path, name: str, arch: int, weights: str) -> None:
    config = CONFIGS[name]
    tensors, _ = _write(tmp_path / "model.m", config, weights, slice_elements=3000)
    file = io.BytesIO()
    shape = {"layers": 3, "heads": 6, "kv_heads": 2}
    is_qwen = name == "qwen3"
    pairs = _converter_pairs(config, arch, weights)
    reference.write_dense_model(file, pairs, tensors.__getitem__, shape, weights, permuted=not is_qwen, qk_norm=is_qwen)
    assert (tmp_path / "model.m").read_bytes() == file.getvalue()


def test_experts_come_gate_down_up(tmp_path: Path) -> None:
    tensors, _ = _write(tmp_path / "model.m", CONFIGS["qwen3_moe"], "q40")
    file = io.BytesIO()
    reference.write_tensor(file, tensors["model.embed_tokens.weight"], "f32")
    for layer in range(3):
        prefix = f"model.layers.{layer}."
        for part in "qkvo":
            reference.write_tensor(file, tensors[f"{prefix}self_attn.{part}_proj.weight"], "q40")
        reference.write_tensor(file, tensors[f"{prefix}mlp.gate.weight"], "f32")
        for expert in range(5):
            for part in ("gate", "down", "up"):
                reference.write_tensor(file, tensors[f"{prefix}mlp.experts.{expert}.{part}_proj.weight"], "q40")
        for part in ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"):
            reference.write_tensor(file, tensors[f"{prefix}{part}.weight"], "f32")
    reference.write_tensor(file, tensors["model.norm.weight"], "f32")
    reference.write_tensor(file, tensors["lm_head.weight"], "q40")
    header = read_header(tmp_path / "model.m")
    assert (header.values["moe_hidden_dim"], header.values["n_experts"], header.values["hidden_dim"]) == (32, 5, 160)
    assert (tmp_path / "model.m").read_bytes()[header.num_bytes :] == file.getvalue()


def test_the_own_architecture_is_laid_out_as_documented(tmp_path: Path) -> None:
    tensors, written = _write(tmp_path / "model.m", CONFIGS["glm4_moe"], "q80")
    file = io.BytesIO()
    reference.write_tensor(file, tensors["model.embed_tokens.weight"], "f32")
    for layer in range(3):
        prefix = f"model.layers.{layer}."
        names = [f"self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")] + ["self_attn.o_proj.weight"]
        if layer == 0:
            names += [f"mlp.{part}_proj.weight" for part in ("gate", "down", "up")]
        else:
            names += ["mlp.gate.weight", "mlp.gate.e_score_correction_bias"]
            stems = [*(f"mlp.experts.{expert}" for expert in range(6)), "mlp.shared_experts"]
            names += [f"{stem}.{part}_proj.weight" for stem in stems for part in ("gate", "down", "up")]
        names += [
            f"{part}.weight" for part in ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm")
        ]
        for name in names:
            reference.write_tensor(file, tensors[prefix + name], "q80" if "_proj.weight" in name else "f32")
    reference.write_tensor(file, tensors["model.norm.weight"], "f32")
    reference.write_tensor(file, tensors["lm_head.weight"], "q80")
    header = read_header(tmp_path / "model.m")
    assert (tmp_path / "model.m").read_bytes()[header.num_bytes :] == file.getvalue()
    assert header.values["arch_type"] == 0x574C4D01 and any(
        "stock Distributed Llama refuses it" in note for note in written.notes
    )
    assert any("multi-token-prediction" in note for note in written.notes)


def test_sizes_by_the_formula() -> None:
    """The 2.2 GB model of the benchmark, and GLM-4.5-Air: q40 is 18 bytes per 32 weights, the embedding and routers are F32."""
    big = CONFIGS["llama"] | {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    }
    matrices = 16 * (2 * 2048 * 2048 + 2 * 512 * 2048 + 3 * 8192 * 2048) + 32000 * 2048
    header = 8 + 8 * 16
    assert file_bytes(big, "q40") == header + matrices * 18 // 32 + 4 * (32000 * 2048 + 33 * 2048)
    assert file_bytes(big, "f16") == header + matrices * 2 + 4 * (32000 * 2048 + 33 * 2048)
    configs = Path(__file__).parents[4] / "src" / "windlass" / "model" / "families" / "configs"
    air = msgspec.json.decode((configs / "zai-org--GLM-4.5-Air.json").read_bytes())
    assert file_bytes(air, "q40") == pytest.approx(62.3e9, rel=0.005)


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["f32", "q40"])
def test_any_rows_can_be_read(tmp_path: Path, weights: str) -> None:
    _write(tmp_path / "model.m", CONFIGS["llama"], weights)
    with DllamaStore(tmp_path / "model.m") as store:
        for name in ("model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.o_proj.weight"):
            whole = _read_all(store, name)
            for start, stop in ((0, 1), (5, 40), (31, 33), (60, len(whole)), (7, 7)):
                assert torch.equal(store.read(name, start, min(stop, len(whole))), whole[start:stop])
        norm = _read_all(store, "model.norm.weight")
        assert torch.equal(store.read("model.norm.weight", 3, 9), norm[3:9])


@pytest.mark.parametrize(("weights", "block"), [("q40", "Q4_0"), ("q80", "Q8_0")])
def test_raw_blocks_are_the_rows_blocks(tmp_path: Path, weights: str, block: str) -> None:
    tensors, _ = _write(tmp_path / "model.m", CONFIGS["llama"], weights)
    with DllamaStore(tmp_path / "model.m") as store:
        for name in ("model.layers.0.self_attn.k_proj.weight", "lm_head.weight"):
            file = io.BytesIO()
            reference.write_tensor(file, tensors[name][9:41], weights)
            assert store.raw_blocks(name, 9, 41) == (block, file.getvalue())
        embedding = tensors["model.embed_tokens.weight"]
        assert store.raw_blocks("model.embed_tokens.weight", 3, 5) == ("F32", embedding[3:5].numpy().tobytes())
        assert (store.dtype("lm_head.weight"), store.block_type("lm_head.weight")) == ("F32", block)
        with pytest.raises(IndexError, match="one dimension"):
            store.raw_blocks("model.norm.weight", 0, 1)
        with pytest.raises(BadInput, match=r"has no tensor nothing\.weight"):
            store.read("nothing.weight", 0, 1)


@pytest.mark.parametrize("name", ["llama", "glm4_moe"])
@pytest.mark.parametrize("weights", TYPES)
def test_a_second_conversion_changes_nothing(tmp_path: Path, name: str, weights: str) -> None:
    _write(tmp_path / "first.m", CONFIGS[name], weights)
    with DllamaStore(tmp_path / "first.m") as store:
        write_model(tmp_path / "second.m", store.config, store.read, weights, jobs=1)
    assert (tmp_path / "second.m").read_bytes() == (tmp_path / "first.m").read_bytes()


def test_progress_and_slices_and_jobs(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    threads = torch.get_num_threads()
    _, written = _write(
        tmp_path / "a.m", CONFIGS["qwen3"], "q40", jobs=3, slice_elements=1, progress=lambda *part: seen.append(part)
    )
    _write(tmp_path / "b.m", CONFIGS["qwen3"], "q40", jobs=1)
    assert (tmp_path / "a.m").read_bytes() == (tmp_path / "b.m").read_bytes()
    assert sum(count for _, count in seen) == written.num_bytes - read_header(tmp_path / "a.m").num_bytes
    assert torch.get_num_threads() == threads


def test_a_window_cuts_the_context(tmp_path: Path) -> None:
    _, written = _write(tmp_path / "model.m", CONFIGS["mistral"], "q40")
    assert read_header(tmp_path / "model.m").values["max_seq_len"] == 128
    assert written.notes == ("the format has no sliding windows: the context is limited to the window of 128 tokens",)


def test_types_that_distributed_llama_does_not_run_are_said(tmp_path: Path) -> None:
    assert _write(tmp_path / "a.m", CONFIGS["llama"], "q40")[1].notes == ()
    assert "this one is q80" in _write(tmp_path / "a.m", CONFIGS["llama"], "q80")[1].notes[0]


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "glm4_moe"])
def test_a_truncated_or_longer_file_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.m"
    _write(path, CONFIGS[name], "q40")
    data = path.read_bytes()
    for cut in (len(data) - 1, len(data) // 2, read_header(path).num_bytes):
        path.write_bytes(data[:cut])
        with pytest.raises(
            BadCheckpoint, match=rf"model\.m, tensor .*, byte \d+: needs \d+ bytes but the file ends at byte {cut}"
        ):
            DllamaStore(path)
    path.write_bytes(data + b"x")
    with pytest.raises(BadCheckpoint, match=rf"byte {len(data)}: 1 bytes follow the last tensor"):
        DllamaStore(path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.m"
    _write(path, CONFIGS["llama"], "q40")
    with DllamaStore(path) as store:
        os.truncate(path, path.stat().st_size - 100)
        with pytest.raises(BadCheckpoint, match=r"tensor lm_head\.weight, byte \d+: the file ends within the tensor"):
            _read_all(store, "lm_head.weight")


@pytest.mark.parametrize("name", ["llama-bands", "qwen3_moe", "glm4_moe"])
@pytest.mark.parametrize("value", [0, 1, 7, 0x7FFFFFFF, -5])
def test_every_header_value_wrong(tmp_path: Path, name: str, value: int) -> None:
    """Refused in one line, or so small a difference (a flag, theta, the context) that the file still reads."""
    path = tmp_path / "model.m"
    _write(path, CONFIGS[name], "q40")
    header, data = read_header(path), path.read_bytes()
    for key in header.values:
        changed = header_bytes(header.values | {key: value})
        path.write_bytes(changed + data[header.num_bytes :])
        try:
            DllamaStore(path).close()
        except Error as error:
            assert "\n" not in str(error) and "model.m" in str(error)


@pytest.mark.parametrize("missing", ["arch_type", "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "max_seq_len"])
def test_a_missing_key_is_named(tmp_path: Path, missing: str) -> None:
    path = tmp_path / "model.m"
    _write(path, CONFIGS["llama"], "q40")
    header = read_header(path)
    path.write_bytes(header_bytes({key: value for key, value in header.values.items() if key != missing}) + bytes(1000))
    with pytest.raises(BadConfig, match=missing):
        DllamaStore(path)


def test_a_header_that_claims_a_million_tensors_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "model.m"
    _write(path, CONFIGS["qwen3_moe"], "q40")
    header = read_header(path)
    claimed = header.values | {"n_layers": 4096, "n_experts": 65536, "n_active_experts": 8}
    path.write_bytes(header_bytes(claimed) + path.read_bytes()[header.num_bytes :])
    with pytest.raises(BadCheckpoint, match="truncated"):
        DllamaStore(path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", {"attention_bias": True}, r"cannot store mixer\.k\.bias, mixer\.o\.bias, mixer\.q\.bias, mixer\.v\.bias"),
        ("llama", {"mlp_bias": True}, r"cannot store ffn\.down\.bias"),
        ("llama", {"rope_theta": 10000.5}, "rope_theta 10000.5 is not an integer"),
        ("llama", {"rms_norm_eps": 1e-4}, "rms_norm_eps 0.0001"),
        ("llama", {"hidden_act": "gelu_new"}, "activation gelu_tanh"),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "no RoPE scaling"),
        ("llama", {"rope_scaling": _SCALING | {"factor": 2.5}}, "rope scaling factor 2.5"),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "no RoPE scaling"),
        ("qwen3_moe", {"norm_topk_prob": False}, "always renormalises"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "experts in every layer or in none"),
        (
            "glm4_moe",
            {"first_k_dense_replace": None, "mlp_layer_types": ["sparse", "dense", "sparse"]},
            "dense layers after MoE layers",
        ),
        ("llama", {"intermediate_size": 48}, r"down_proj\.weight has rows of 48, not a multiple of the block size 32"),
    ],
)
def test_what_the_file_cannot_say_is_impossible(tmp_path: Path, name: str, change: dict[str, Any], message: str) -> None:
    config = {key: value for key, value in (CONFIGS[name] | change).items() if value is not None}
    with pytest.raises(Impossible, match=message):
        write_model(tmp_path / "model.m", config, lambda *_: pytest.fail("nothing should be read"))
    assert not list(tmp_path.iterdir())


def test_other_families_are_impossible(tmp_path: Path) -> None:
    tiny = Path(__file__).parents[3] / "model" / "families" / "tiny" / "mixtral.json"
    with pytest.raises(Impossible, match="do not support mixtral models; supported: glm4_moe, llama, mistral, qwen3, qwen3_moe"):
        file_bytes(msgspec.json.decode(tiny.read_bytes()))
    with pytest.raises(UnknownName, match="q40"):
        file_bytes(CONFIGS["llama"], "q4")


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    tensors = _tensors(CONFIGS["llama"])
    (tmp_path / "model.m").write_bytes(b"before")
    tensors["model.layers.2.mlp.up_proj.weight"][80, 3] = float("nan")
    with pytest.raises(BadCheckpoint, match=r"tensor model\.layers\.2\.mlp\.up_proj\.weight: rows 64\.\.96: a weight is NaN"):
        write_model(tmp_path / "model.m", CONFIGS["llama"], _reader(tensors), slice_elements=32 * 64)
    tensors = _tensors(CONFIGS["llama"]) | {"model.norm.weight": torch.zeros(63)}
    with pytest.raises(BadCheckpoint, match="the config says"):
        write_model(tmp_path / "model.m", CONFIGS["llama"], _reader(tensors), "f32")
    assert (tmp_path / "model.m").read_bytes() == b"before" and len(list(tmp_path.iterdir())) == 1


def test_every_own_key_is_used(tmp_path: Path) -> None:
    _write(tmp_path / "model.m", CONFIGS["glm4_moe"], "q40")
    assert {key for key, number in KEYS.items() if number > 1000} <= read_header(tmp_path / "model.m").values.keys()
