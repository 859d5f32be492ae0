"""Loading takes the weights and one slice, in every form; letting go gives it all back; and the plan's bytes are the bytes loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from windlass.core.layout import Layout  # noqa: E402
from windlass.core.place import local_bytes, place  # noqa: E402
from windlass.core.rule import ModelPart  # noqa: E402
from windlass.core.scheme import scheme  # noqa: E402
from windlass.runtime.weights import CheckpointWeights, open_model  # noqa: E402
from windlass.tasks.convert.convert import ConvertSettings, convert  # noqa: E402
from windlass.units import MIB  # noqa: E402

pytestmark = pytest.mark.cpu

SLICE_BYTES = 32 * MIB
"""What reading and decoding may hold beside the weights, as weights.checkpoint says."""
SOURCE = Path(__file__).parents[4] / "src"

# Peak of resident memory since it was last reset (man 5 proc_pid_clear_refs), less what was resident before.
PROGRAM = """
import gc, json, sys
from pathlib import Path
import torch
from windlass.runtime.weights import CheckpointWeights, open_model

torch.set_num_threads(1)

def status(field):
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))

def load(weights):
    held = []
    for ours in weights._index.held(weights.spec, (0, weights.spec.num_layers), (0, 0)):
        held.append(weights.vector(ours.name) if len(ours.shape) == 1 else weights.matrix(ours.name))
    for layer in range(weights.spec.num_layers if weights.spec.experts else 0):
        for parts in (("gate", "up"), ("down",)):
            held += [weights.experts(layer, *parts), weights.expert_vectors(layer, *parts)]
    return held

def measure(path, exact):
    opened = open_model(Path(path))
    weights = CheckpointWeights(opened, keep_quantized=not exact)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    held = load(weights)
    num_bytes = sum(one.nbytes if isinstance(one, torch.Tensor) else one.num_bytes for one in held)
    rise, said = status("VmHWM") - before, weights.memory_bytes()
    del held, weights
    gc.collect()
    CheckpointWeights(opened)  # the next model
    opened.store.close()
    return {"bytes": num_bytes, "said": said, "rise": rise, "left": status("VmRSS") - before}

measure(sys.argv[1], False)  # libraries, threads, the compiled kernels
print(json.dumps([measure(path, exact == "exact") for path, exact in zip(sys.argv[2::2], sys.argv[3::2])]))
"""


def write(folder: Path, config: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...]]]) -> Path:
    """A checkpoint of the same random bytes over and over."""
    folder.mkdir()
    header, position = dict[str, Any](), 0
    for name, (dtype, shape) in tensors.items():
        end = position + prod(shape) * {"U8": 1, "BF16": 2, "I32": 4, "I64": 8, "F32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    block = os.urandom(2**20)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, position, len(block)):
            file.write(block[: position - start])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


LLAMA = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 1, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 1000, "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_embd": 1024, "n_layer": 1, "n_head": 16, "n_positions": 128, "n_inner": 16384, "vocab_size": 1000,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
}  # fmt: skip
GPT_OSS = json.loads((Path(__file__).parents[3] / "model" / "families" / "tiny" / "gpt_oss.json").read_text()) | {
    "hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 1, "layer_types": ["full_attention"],
    "num_local_experts": 16, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip


def of_rules(config: dict[str, Any], dtype: str, packed_bits: int = 0) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor that the config calls for; matrices of the layers in groups of 128 where bits are given."""
    from windlass.core.rule import stored_tensors
    from windlass.model.families import describe, rules

    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for tensor in stored_tensors(rules(describe(config))):
        kind = "U8" if tensor.name.endswith(("_blocks", "_scales")) else dtype
        if not packed_bits or not tensor.name.endswith("proj.weight"):
            found[tensor.name] = (kind, tensor.shape)
            continue
        rows, inputs = tensor.shape
        found[f"{tensor.name}_packed"] = ("I32", (rows, inputs * packed_bits // 32))
        found[f"{tensor.name}_scale"] = ("BF16", (rows, inputs // 128))
        found[f"{tensor.name}_shape"] = ("I64", (2,))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_is_the_weights_and_a_slice(tmp_path: Path, smollm2: Path) -> None:
    cases = {
        "bf16": (write(tmp_path / "bf16", LLAMA, of_rules(LLAMA, "BF16")), "kept"),
        "bf16 widened": (tmp_path / "bf16", "exact"),
        "transposed": (write(tmp_path / "transposed", GPT2, of_rules(GPT2, "F32")), "kept"),
        "int4": (write(tmp_path / "int4", LLAMA, of_rules(LLAMA, "BF16", 4)), "kept"),
        "mxfp4 experts": (write(tmp_path / "mxfp4", GPT_OSS, of_rules(GPT_OSS, "BF16")), "kept"),
        "gguf": (smollm2, "kept"),
        "gguf widened": (smollm2, "exact"),
    }
    small = write(tmp_path / "small", LLAMA | {"hidden_size": 256}, of_rules(LLAMA | {"hidden_size": 256}, "BF16", 4))
    words = [str(small), *(str(word) for case in cases.values() for word in case)]
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, found in zip(cases, json.loads(done.stdout), strict=True):
        print(
            f"{name}: {found['bytes'] / MIB:.0f} MiB, {(found['rise'] - found['bytes']) / MIB:+.1f} at most, {found['left'] / MIB:+.1f} left"
        )
        assert found["bytes"] > 32 * MIB, "large enough to tell"
        assert found["rise"] < found["bytes"] + SLICE_BYTES, name
        assert found["left"] < SLICE_BYTES, name
        assert found["said"] == found["bytes"], name


# --- the plan


def loaded_bytes(weights: CheckpointWeights) -> int:
    held = [
        weights.vector(ours.name) if len(ours.shape) == 1 else weights.matrix(ours.name)
        for ours in weights._index.held(weights.spec, (0, weights.spec.num_layers), None)
    ]
    return sum(one.nbytes if isinstance(one, torch.Tensor) else one.num_bytes for one in held)


def planned_bytes(opened: Any, how: Any) -> int:
    placed = place(opened.rules, opened.spec.num_layers, Layout(), how)
    return sum(
        local_bytes(rule, placed, how, 0) * rule.copies
        for rule in opened.rules
        if rule.part is ModelPart.MAIN and rule.copy_of is None
    )


@pytest.fixture(scope="module")
def real_widths(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's, three layers of them: what a plan leaves out is a part of each layer."""
    widths = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    return tiny.make(tmp_path_factory.mktemp("real") / "model", "llama", **widths, num_hidden_layers=3, vocab_size=2048)


@pytest.mark.parametrize("quant", ["int4", "int8", "fp8", "bf16"])
def test_memory_is_as_planned(real_widths: Path, tmp_path: Path, quant: str) -> None:
    """Vectors are in fp32 where the plan has 16 bits, and rows are filled up to sixteen: less than a percent of a real model."""
    convert(real_widths, tmp_path / "out", ConvertSettings(scheme=scheme(quant), jobs=2))
    opened = open_model(tmp_path / "out")
    loaded, planned = loaded_bytes(CheckpointWeights(opened)), planned_bytes(opened, scheme(quant))
    assert loaded == pytest.approx(planned, rel=0.01)


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3", "deepseek_v3", "gpt2"])
def test_tiny_models_are_as_planned_but_for_vectors_and_padding(tiny: Any, tmp_path: Path, name: str) -> None:
    convert(tiny.make(tmp_path / name, name), tmp_path / "out", ConvertSettings(scheme=scheme("int4", 32), jobs=1))
    opened = open_model(tmp_path / "out")
    weights, how = CheckpointWeights(opened), scheme("int4", 32)
    held = list(weights._index.held(weights.spec, (0, weights.spec.num_layers), None))
    vectors = sum(ours.shape[0] * 2 for ours in held if len(ours.shape) == 1 and ours.rule.keep.value != "float32")
    padding = 0
    for ours in held:
        found = weights.matrix(ours.name) if len(ours.shape) == 2 else None
        if found is not None and not isinstance(found, torch.Tensor):
            padding += found.num_bytes * (-found.shape[0] % 16) // (found.num_panels * 16)
    assert loaded_bytes(weights) == planned_bytes(opened, how) + vectors + padding
