"""Speed of `windlass convert`, compared with copying the files and with a per-block Python writer. Run: python bench/convert/speed.py [--rounds 3]

The model is the 2.2 GB Llama-shaped one (16 layers, hidden 2048, ffn 8192, 32/8 heads, vocabulary 32,000; random bf16 weights in
three files). Every candidate runs once per round, and ratios are taken within a round, so that other load on the machine cancels out.

- `windlass convert` runs in a subprocess; seconds are those of its report, from opening the source to the last sync, without
  the two seconds of importing torch (which "command" includes).
- The copy is shutil.copyfile and fsync, one thread per core.
- The per-block writer is bench/convert/dllama_reference.py. One layer a round is read, quantized and written to a file, and the seconds are
  scaled to all packed weights; the embedding, which it writes as floats, likewise. `--whole-writer` runs all of it once instead.

GB/s refer to the source size. Page caches are dropped before each run if permitted, unless `--warm`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import dllama_reference
import torch
from safetensors import safe_open
from safetensors.torch import save_file

LAYERS, HIDDEN, FFN, HEADS, KV_HEADS, VOCABULARY = 16, 2048, 8192, 32, 8, 32_000
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": FFN,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
MATRICES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
    "self_attn.v_proj": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
    "mlp.up_proj": (FFN, HIDDEN),
}
NUM_FILES = 3
QUANTS = ("int4", "int8", "fp8", "bf16")
EMBEDDING_ROWS = 1000
NEEDED_TIMES_WRITER, NEEDED_TIMES_COPY = 15.0, 0.5


# --- the model --------------------------------------------------------------------------------------------------------


def make_model(folder: Path) -> None:
    layers: dict[str, tuple[int, ...]] = {}
    for layer in range(LAYERS):
        layers |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in MATRICES.items()}
        layers |= {f"model.layers.{layer}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), **layers, "model.norm.weight": (HIDDEN,)}
    shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    draw, names = torch.Generator().manual_seed(0), list(shapes)
    weight_map: dict[str, str] = {}
    for number in range(NUM_FILES):
        part = names[number * len(names) // NUM_FILES : (number + 1) * len(names) // NUM_FILES]
        file = f"model-{number + 1:05}-of-{NUM_FILES:05}.safetensors"
        tensors = {name: torch.randn(shapes[name], generator=draw).mul_(0.02).bfloat16() for name in part}
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


# --- candidates -------------------------------------------------------------------------------------------------


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def copy(source: Path, out: Path) -> None:
    def one(file: Path) -> None:
        shutil.copyfile(file, out / file.name)
        with (out / file.name).open("rb+") as stream:
            os.fsync(stream.fileno())

    out.mkdir()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(one, sorted(source.iterdir(), key=lambda file: -file.stat().st_size)))


def converted(source: Path, out: Path, quant: str) -> dict[str, float]:
    command = [sys.executable, "-m", "windlass", "convert", str(source), str(out), "--quant", quant, "--json"]
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    return {
        "seconds": report["seconds"],
        "command": time.perf_counter() - began,
        "output_bytes": report["output_bytes"],
        "peak_bytes": report["peak_memory_bytes"],
    }


class Reader:
    """Loads tensors by name, as Distributed Llama's converter does."""

    def __init__(self, folder: Path) -> None:
        self._files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        self._folder = folder

    def __call__(self, name: str) -> torch.Tensor:
        with safe_open(self._folder / self._files[name], "pt") as file:
            return file.get_tensor(name)


def writer_seconds(source: Path, out: Path, layer: int) -> float:
    """Extrapolated from one layer and some rows of the embedding."""
    read = Reader(source)
    packed = sum(rows * columns for rows, columns in MATRICES.values())

    def one_layer() -> None:
        with out.open("wb") as file:
            for name in MATRICES:
                dllama_reference.write_tensor(file, read(f"model.layers.{layer}.{name}.weight"), "q40")

    embedding = read("model.embed_tokens.weight")[:EMBEDDING_ROWS]
    per_layer = timed(one_layer)
    with out.open("wb") as file:
        per_row = timed(lambda: dllama_reference.write_tensor(file, embedding, "f32")) / EMBEDDING_ROWS
    return per_layer * (LAYERS + VOCABULARY * HIDDEN / packed) + per_row * VOCABULARY


def whole_writer_seconds(source: Path, out: Path) -> float:
    shape = {"layers": LAYERS, "heads": HEADS, "kv_heads": KV_HEADS}

    def write() -> None:
        with out.open("wb") as file:
            dllama_reference.write_dense_model(file, [], Reader(source), shape, "q40", permuted=True, qk_norm=False)

    return timed(write)


def drop_caches() -> bool:
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError:
        return False
    return True


# --- rounds and table -------------------------------------------------------------------------------------------------


def one_round(source: Path, folder: Path, layer: int, fresh: Callable[[], object]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    out = folder / "out"
    fresh()
    found["copy"] = {"seconds": timed(lambda: copy(source, out))}
    shutil.rmtree(out)
    for quant in QUANTS:
        fresh()
        found[quant] = converted(source, out, quant)
        shutil.rmtree(out)
    fresh()
    found["per-block writer, int4"] = {"seconds": writer_seconds(source, folder / "writer", layer)}
    return found


def print_table(rounds: list[dict[str, dict[str, float]]], num_bytes: int) -> None:
    print("\n| | seconds (median) | GB/s | command, seconds | written, GB | peak memory, MB | all rounds, seconds |")
    print("|---|---|---|---|---|---|---|")
    for name in rounds[0]:
        middle = {key: statistics.median(one[name][key] for one in rounds) for key in rounds[0][name]}
        more = [f"{middle[key] / scale:{form}}" if key in middle else "" for key, scale, form in COLUMNS]
        each = ", ".join(f"{one[name]['seconds']:.1f}" for one in rounds)
        print(f"| {name} | {middle['seconds']:.2f} | {num_bytes / middle['seconds'] / 1e9:.2f} | {' | '.join(more)} | {each} |")


COLUMNS = (("command", 1, ".2f"), ("output_bytes", 1e9, ".2f"), ("peak_bytes", 1e6, ".0f"))


def print_ratios(rounds: list[dict[str, dict[str, float]]]) -> None:
    print("\n| int4 conversion | median | worst round | required |\n|---|---|---|---|")
    for name, other, needed in (
        ("times the per-block writer's speed", "per-block writer, int4", NEEDED_TIMES_WRITER),
        ("times the copy's speed", "copy", NEEDED_TIMES_COPY),
    ):
        ratios = [one[other]["seconds"] / one["int4"]["seconds"] for one in rounds]
        print(f"| {name} | {statistics.median(ratios):.2f} | {min(ratios):.2f} | {needed:g} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm", action="store_true", help="leave the source in the page cache")
    parser.add_argument("--whole-writer", action="store_true", help="also time the per-block writer on the whole model")
    args = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory(prefix="windlass-bench-") as name:
        folder = Path(name)
        source = folder / "model"
        source.mkdir()
        make_model(source)
        num_bytes = sum(file.stat().st_size for file in source.iterdir())
        cold = not args.warm and drop_caches()
        print(f"{num_bytes / 1e9:.2f} GB of bf16, {os.cpu_count()} cores, reads {'from disk' if cold else 'from the page cache'}")
        converted(source, folder / "first", "int4")  # compiles the kernels if necessary
        shutil.rmtree(folder / "first")
        rounds = [one_round(source, folder, layer, drop_caches if cold else os.sync) for layer in range(args.rounds)]
        print_table(rounds, num_bytes)
        print_ratios(rounds)
        if args.whole_writer:
            print(f"\nThe per-block writer on the whole model: {whole_writer_seconds(source, folder / 'writer'):.0f} s")


if __name__ == "__main__":
    main()
