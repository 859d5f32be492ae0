"""What is opened, and what is refused: one clear line before anything large is read."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from windlass.errors import BadCheckpoint, BadInput, Error, Impossible  # noqa: E402
from windlass.runtime.weights import CheckpointWeights, open_model, open_source  # noqa: E402

pytestmark = pytest.mark.cpu


def rewritten(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def one_line(path: Path, kind: type[Error], wrong: str) -> None:
    with pytest.raises(kind, match=wrong) as error:
        open_model(path)
    assert "\n" not in str(error.value)


def test_what_is_opened(tiny: Any, tmp_path: Path) -> None:
    opened = open_model(tiny.make(tmp_path / "model", "glm4_moe"))
    assert opened.spec.family == "glm4_moe" and opened.kind == "hf"
    assert opened.locations["layers.0.mixer.q.weight"].name == "model.layers.0.self_attn.q_proj.weight"
    storage = CheckpointWeights(opened).storage()
    assert storage.keys() == {"BF16", "F32"} and storage["F32"] < storage["BF16"]


def test_a_directory_of_one_file_is_that_file(gguf_maker: ModuleType, tmp_path: Path) -> None:
    config = gguf_maker.small_config("qwen3")
    gguf_maker.write_gguf(tmp_path / "model-Q8_0.gguf", "qwen3", config, gguf_maker.expected_tensors(config), kind="Q8_0")
    (tmp_path / "config.json").write_text("{}")  # some lie beside
    opened = open_model(tmp_path)
    assert opened.kind == "gguf" and opened.spec.name == "model-Q8_0"


def test_a_path_that_is_not_there(tmp_path: Path) -> None:
    one_line(tmp_path / "nothing", BadInput, "does not exist; give a model directory")
    (tmp_path / "notes.txt").touch()
    one_line(tmp_path / "notes.txt", BadInput, "neither a model directory")
    (tmp_path / "empty").mkdir()
    one_line(tmp_path / "empty", BadInput, "contains no weights; looked for")


def test_an_unknown_architecture(tiny: Any, tmp_path: Path) -> None:
    one_line(
        rewritten(tiny.make(tmp_path / "model", "qwen3"), model_type="mamba"), BadInput, "mamba.* is not supported; supported: "
    )


@pytest.mark.parametrize("name", ["evo2", "glm_moe_dsa"])
def test_mathematics_that_nobody_has_here(tiny: Any, tmp_path: Path, name: str) -> None:
    one_line(tiny.make(tmp_path / name, name), Impossible, f"{name} cannot be run")


def test_such_a_model_can_still_be_converted(tiny: Any, tmp_path: Path) -> None:
    assert open_source(tiny.make(tmp_path / "model", "glm_moe_dsa")).spec.engines == ("vllm",)


def test_missing_files(tiny: Any, tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "model", "qwen3")
    (folder / "model-00002-of-00002.safetensors").unlink()
    one_line(folder, BadCheckpoint, "model-00002-of-00002.safetensors, which is missing")


def test_others_ways_of_packing(tiny: Any, tmp_path: Path) -> None:
    folder = rewritten(tiny.make(tmp_path / "model", "qwen3"), quantization_config={"quant_method": "aqlm", "bits": 2})
    one_line(folder, BadInput, r"quant_method 'aqlm' is not supported \(supported: compressed-tensors, fp8, mxfp4, awq, gptq\)")


def damaged(tiny: Any, folder: Path, change: Any) -> Path:
    config = tiny.config("mistral")
    made = tiny.rules(config)
    tensors = tiny.stored(made, tiny.values(made))
    change(tensors)
    return tiny.write(folder, config, tensors)


def _missing(tensors: dict[str, Any]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def _another_shape(tensors: dict[str, Any]) -> None:
    tensors["model.layers.0.self_attn.o_proj.weight"] = torch.zeros(3, 5, dtype=torch.bfloat16)


def _another_type(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)


def _unknown(tensors: dict[str, Any]) -> None:
    tensors["model.layers.0.self_attn.q_proj.lora_A.weight"] = torch.zeros(4, 4)


def _without_scales(tensors: dict[str, Any]) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def _packed(tensors: dict[str, Any], scale: torch.Size | tuple[int, ...] = (96, 4), **more: Any) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    del tensors[name]
    tensors[f"{name}_packed"] = torch.zeros(96, 16, dtype=torch.int32)
    tensors[f"{name}_scale"] = torch.ones(scale, dtype=torch.bfloat16)
    tensors[f"{name}_shape"] = torch.tensor([96, 128])
    tensors |= {f"{name}_{part}": value for part, value in more.items()}


def _torn_groups(tensors: dict[str, Any]) -> None:
    _packed(tensors, scale=(96, 3))


def _too_few_scales(tensors: dict[str, Any]) -> None:
    _packed(tensors, scale=(95, 4))


def _ordered_groups(tensors: dict[str, Any]) -> None:
    _packed(tensors, g_idx=torch.arange(128))


def _wrong_zeros(tensors: dict[str, Any]) -> None:
    _packed(tensors, zero_point=torch.zeros(96, 4, dtype=torch.int32))


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (_missing, "tensor model.layers.1.mlp.up_proj.weight: missing from the checkpoint"),
        (_another_shape, r"o_proj.weight: its shape is \[3, 5\], but the config requires \[128, 128\]"),
        (_another_type, "norm.weight: its dtype is I32"),
        (_unknown, "lora_A.weight: unexpected tensor for this architecture"),
        (_without_scales, "up_proj.weight: stored in 8 bits, but its scale"),
        (_torn_groups, "neither 4 nor 8 bits per weight"),
        (_too_few_scales, r"up_proj.weight_scale: is BF16 \[95, 4\]"),
        (_ordered_groups, "activation ordering"),
        (_wrong_zeros, r"up_proj.weight_zero_point: is I32 \[96, 4\]; expected I32 \[12, 4\]"),
    ],
)
def test_damage_is_named(tiny: Any, tmp_path: Path, change: Any, wrong: str) -> None:
    one_line(damaged(tiny, tmp_path / "model", change), BadCheckpoint, wrong)


def test_packed_by_hand_is_read(tiny: Any, tmp_path: Path) -> None:
    weights = CheckpointWeights(open_model(damaged(tiny, tmp_path / "model", _packed)))
    panels = weights.matrix("layers.0.ffn.up.weight")
    assert (panels.kind, panels.group) == ("int4", 32) and (panels.dense() == -8).all()


def test_a_file_that_is_cut_while_it_is_read(tiny: Any, tmp_path: Path) -> None:
    opened = open_model(tiny.make(tmp_path / "model", "mistral"))
    for file in (tmp_path / "model").glob("*.safetensors"):
        with file.open("r+b") as stream:
            stream.truncate(file.stat().st_size // 3)
    weights = CheckpointWeights(opened)
    with pytest.raises(BadCheckpoint, match="truncated"):
        for layer in range(opened.spec.num_layers):
            weights.matrix(f"layers.{layer}.ffn.gate.weight", f"layers.{layer}.ffn.up.weight", f"layers.{layer}.mixer.q.weight")
            weights.matrix(f"layers.{layer}.ffn.down.weight")
