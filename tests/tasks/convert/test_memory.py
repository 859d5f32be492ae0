"""Peak resident memory of a conversion stays under what was allowed plus 300 MB, the program's own, whatever the tensors' size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest

from windlass.units import MB

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[3]
PROGRAM_BYTES = 300 * MB
DTYPES = {"BF16": "bfloat16", "F32": "float32"}

Shapes = dict[str, tuple[int, ...]]


def write(folder: Path, config: dict[str, Any], shapes: Shapes, dtype: str) -> Path:
    """A checkpoint of the same random megabyte over and over."""
    folder.mkdir()
    kind = getattr(torch, DTYPES[dtype])
    numbers = torch.randn(2**19, generator=torch.Generator().manual_seed(0)) * 0.02
    block = memoryview(numbers.to(kind).view(torch.uint8).numpy())
    header, position = dict[str, Any](), 0
    for name, shape in shapes.items():
        end = position + prod(shape) * kind.itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, position, len(block)):
            file.write(block[: position - start])
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": DTYPES[dtype]}))
    return folder


def large_head(vocabulary: int, hidden: int = 2048, ffn: int = 512) -> tuple[dict[str, Any], Shapes]:
    config = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": 1, "num_attention_heads": 16,
        "num_key_value_heads": 16, "vocab_size": vocabulary, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "hidden_act": "silu",
    }  # fmt: skip
    layer = "model.layers.0."
    shapes: Shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
    shapes |= {f"{layer}self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
    shapes |= {f"{layer}mlp.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
    shapes |= {f"{layer}mlp.down_proj.weight": (hidden, ffn), "model.norm.weight": (hidden,)}
    return config, shapes | {f"{layer}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}


def transposed(inner: int, hidden: int = 1024, vocabulary: int = 1024) -> tuple[dict[str, Any], Shapes]:
    """GPT-2's Conv1D: [in, out], so that rows of ours are columns of the file."""
    config = {
        "model_type": "gpt2", "n_embd": hidden, "n_layer": 1, "n_head": 16, "n_positions": 128, "n_inner": inner,
        "vocab_size": vocabulary, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    }  # fmt: skip
    shapes: Shapes = {"wte.weight": (vocabulary, hidden), "wpe.weight": (128, hidden)}
    matrices = {"attn.c_attn": (hidden, 3 * hidden), "attn.c_proj": (hidden, hidden)}
    for name, shape in (matrices | {"mlp.c_fc": (hidden, inner), "mlp.c_proj": (inner, hidden)}).items():
        shapes |= {f"h.0.{name}.weight": shape, f"h.0.{name}.bias": shape[1:]}
    for name in ("h.0.ln_1", "h.0.ln_2", "ln_f"):
        shapes |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
    return config, shapes


# A process starts with the peak of the one it was forked from, so that one must be small.
LAUNCHER = """
import os, sys
child = os.posix_spawn(sys.executable, [sys.executable, *sys.argv[1:]], os.environ)
_, status, used = os.wait4(child, 0)
print(os.waitstatus_to_exitcode(status), used.ru_maxrss * 1024)
"""


def peak_bytes(*words: str) -> int:
    """By the kernel's account, which the report must agree with."""
    command = [sys.executable, "-S", "-c", LAUNCHER, "-m", "windlass", "convert", *words, "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    code, peak = done.stdout.splitlines()[-1].split()
    assert code == "0", done.stderr
    said = json.loads("\n".join(done.stdout.splitlines()[:-1]))["peak_memory_bytes"]
    # The kernel keeps two accounts, each a few pages per thread behind.
    assert abs(said - int(peak)) < 0.05 * int(peak)
    return int(peak)


def test_the_report_does_not_count_what_the_parent_holds(tmp_path: Path) -> None:
    """A child of a large process starts with that process's peak, as getrusage has it."""
    source = write(tmp_path / "source", *large_head(256), "BF16")
    code = """
import subprocess, sys
held = b"x" * 700_000_000
print(subprocess.run([sys.executable, "-m", "windlass", "convert", *sys.argv[1:], "--json"], capture_output=True, text=True).stdout)
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "out")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(done.stdout)["peak_memory_bytes"] < 600 * MB


@pytest.mark.parametrize(
    ("dtype", "model", "limit", "jobs"),
    [
        ("BF16", large_head(50_000), 50, 2),
        ("F32", large_head(25_000), 50, 2),
        ("F32", transposed(16_384), 50, 2),
        ("BF16", large_head(20_000), 50, 64),
    ],
    ids=["bf16 head", "fp32 head", "fp32 transposed", "many jobs"],
)
def test_peak_memory(tmp_path: Path, dtype: str, model: tuple[dict[str, Any], Shapes], limit: int, jobs: int) -> None:
    config, shapes = model
    largest = max(map(prod, shapes.values())) * (2 if dtype == "BF16" else 4)
    assert largest > limit * MB
    source = write(tmp_path / "source", config, shapes, dtype)
    peak = peak_bytes(str(source), str(tmp_path / "out"), "--quantize-head", "--max-memory", f"{limit}MB", "--jobs", str(jobs))
    print(f"\n{largest / MB:.0f} MB tensor, {limit} MB allowed: {peak / MB:.0f} MB at most")
    assert peak < limit * MB + PROGRAM_BYTES
