"""Whether a GGUF file takes the memory that was said: by `windlass plan`, by the loader, and what the device's allocator then gave.

Run: PYTHONPATH=src python bench/h200/gguf_memory.py [FILE.gguf ...] [--device cuda] [--on 1xH200] [--small]

Without a file it makes them: random bf16 weights under their published names -> `windlass convert --to gguf`. Every file is planned and then
opened as `windlass run` does it, once as it comes and once with that plan, and answers one prompt.

weights  plan, loader (`memory_bytes`) and allocator may differ by 1 %: vectors and padding
KV       the blocks that the plan asked for, those that the engine has, and the allocator's bytes (a GPU has one spare block, see Runner)
peak     loading, CUDA graphs and a prompt: no more than the plan's total; below it, since the plan also leaves memory free
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from converted_model import make_checkpoint

from windlass.core.launch import Launch
from windlass.core.plan import DeviceMemoryPlan
from windlass.core.request import Sampling
from windlass.model.families import describe
from windlass.open.plan import apply_plan, read_plan
from windlass.runtime.engine.load import build, make_engine, make_info
from windlass.runtime.engine.protocol import Submit
from windlass.runtime.machine.memory import process_memory
from windlass.runtime.weights.load.prefetch import trim_heap

ATTENTION = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
COMMON = {"vocab_size": 32000, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0} | ATTENTION
MODELS: dict[str, dict[str, Any]] = {
    "dense-1.1B": {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16} | COMMON,
    "mixture-0.7B": {"model_type": "qwen3_moe", "hidden_size": 1024, "intermediate_size": 512, "moe_intermediate_size": 512}
    | {"num_hidden_layers": 12, "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True}
    | COMMON,
}
FILES = (("dense-1.1B", "Q4_K_M"), ("mixture-0.7B", "Q4_K_M"), ("dense-1.1B", "Q8_0"), ("dense-1.1B", "Q4_0"))
PROMPT_TOKENS, ANSWER_TOKENS = 1024, 16
CONTEXT, SEQUENCES = 4096, 8
TOLERANCE = 0.01
CPU_SLACK = 32 * 2**20
"""The most that loading takes beside the weights (runtime/weights/load/checkpoint.py)."""


class Use(NamedTuple):
    """Bytes: what was said beforehand, and what there was."""

    said_weights: int
    weights: int
    said_kv: int
    kv: int
    loading: int
    """The peak of the allocator while loading, from before it."""
    peak: int
    """The same over all."""
    device: int
    """Of the device, CUDA's own context included."""


class Row(NamedTuple):
    what: str
    plan: int | None
    said: int | None
    got: int
    slack: int | None = None
    """Bytes that may be off beyond TOLERANCE; None: it is only shown."""

    @property
    def is_off(self) -> bool:
        named = [value for value in (self.plan, self.said) if value is not None]
        return self.slack is not None and any(abs(self.got - value) > TOLERANCE * value + self.slack for value in named)


# --- files


def made(folder: Path, small: bool) -> Iterator[Path]:
    """One at a time; the slow one to make first."""
    for name, kind in FILES:
        config = MODELS[name] | ({"num_hidden_layers": 4} if small else {})
        source, out = folder / name, folder / f"{name}-{kind}.gguf"
        if not source.exists():
            _timed(f"random weights of {name}", in_a_child, make_checkpoint, source, config, describe(config, name))
        _timed(out.name, windlass, "convert", str(source), str(out), "--to", "gguf", "--quant", kind)
        yield out


def in_a_child(work: Any, *values: Any) -> None:
    """So that none of its memory is counted here."""
    child = multiprocessing.get_context("spawn").Process(target=work, args=values)
    child.start()
    child.join()
    if child.exitcode:
        raise SystemExit("the random weights could not be made")


def windlass(*words: str) -> str:
    done = subprocess.run([sys.executable, "-m", "windlass", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"windlass {' '.join(words)}: {done.stderr[-1500:]}")
    return done.stdout


def _timed(what: str, work: Any, *values: Any) -> None:
    began = time.perf_counter()
    work(*values)
    print(f"made {what} in {time.perf_counter() - began:.1f} s", flush=True)


# --- memory


def held(device: str) -> int:
    """By this process: the allocator's bytes on a GPU, pages of its own on a CPU."""
    gc.collect()
    trim_heap()
    return process_memory().anonymous_bytes if device == "cpu" else torch.cuda.memory_allocated(device)


def opened(launch: Launch, device: str) -> Use:
    """The steps of engine.load.load_model, with a look at the memory between them; and a prompt."""
    if device != "cpu":
        torch.zeros(1, device=device)
        gc.collect()  # of the engine before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    before = held(device)
    built = build(launch, device)
    weights, loading = held(device) - before, peak(device) - before
    caches = counted_caches(built.decoder, device)
    engine = make_engine(launch, built.decoder, device)
    if device != "cpu":
        engine.warm_up()
    said = make_info(launch, engine, built, device, 0.0)
    _answer(engine)
    highest, used = peak(device) - before, in_use(device)
    engine.close()
    return Use(said.weights_bytes or 0, weights, said.kv_bytes or 0, caches[0], loading, highest, used)


def counted_caches(decoder: Any, device: str) -> list[int]:
    """Filled with what the allocator gives for the KV cache, when the engine asks for it."""
    make, found = decoder.make_caches, list[int]()

    def counted(*sizes: Any) -> Any:
        before = held(device)
        caches = make(*sizes)
        found.append(held(device) - before)
        return caches

    decoder.make_caches = counted
    return found


def peak(device: str) -> int:
    return held(device) if device == "cpu" else torch.cuda.max_memory_allocated(device)


def in_use(device: str) -> int:
    if device == "cpu":
        return held(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _answer(engine: Any) -> None:
    tokens = [token % 1000 for token in range(PROMPT_TOKENS)]
    engine.submit(Submit(id=1, token_ids=tokens, sampling=Sampling(temperature=0.0), max_tokens=ANSWER_TOKENS))
    while engine.has_work:
        engine.step()


# --- the comparison


def compared(file: Path, device: str, hardware: str) -> int:
    saved = file.with_suffix(".plan.json")
    asked = ["--context", str(CONTEXT), "--concurrency", str(SEQUENCES), "--engine", "windlass"]
    windlass("plan", str(file), "--on", hardware, *asked, "--save", str(saved))
    plan = read_plan(saved)
    as_it_comes = Launch(model=str(file), device=device)
    failed = 0
    print(f"\n{file.name}: {file.stat().st_size / 2**20:,.0f} MiB on disk, planned as {plan.scheme.name}", flush=True)
    for name, launch in (("by the plan", apply_plan(as_it_comes, plan)), ("as it comes", as_it_comes)):
        began = time.perf_counter()
        use = opened(launch, device)
        failed += shown(f"{name} ({time.perf_counter() - began:.1f} s)", use, plan.memory.per_device[0], launch, device)
    return failed


def shown(name: str, use: Use, planned: DeviceMemoryPlan, launch: Launch, device: str) -> int:
    by_plan, on_cpu = launch.kv_bytes is not None, device == "cpu"
    total = planned.total_bytes if by_plan else None
    # Pages of a CPU's process: those of Python and of slices in flight too, and of the cache none before they are written.
    slack = CPU_SLACK if on_cpu else 0
    rows = [
        Row("weights", planned.weights_bytes, use.said_weights, use.weights, slack),
        Row("KV cache", planned.kv_bytes if by_plan else None, use.said_kv, use.kv, None if on_cpu else 0),
        Row("peak while loading", None, None, use.loading),
        Row("other at the peak", planned.activation_bytes if by_plan else None, None, use.peak - use.weights - use.kv),
        Row("peak (plan: total)", total, None, use.peak),
        Row("in use of the device", None, None, use.device),
    ]
    print(f"  {name:28} {'plan':>12} {'said':>12} {'allocated':>12}   MiB")
    for row in rows:
        columns = " ".join(f"{'-' if value is None else f'{value / 2**20:,.1f}':>12}" for value in row[1:4])
        print(f"  {row.what:28} {columns}   {'FAILED' if row.is_off else ''}", flush=True)
    too_much = total is not None and use.peak > total
    print("  FAILED: more than the plan's total" if too_much else "", flush=True)
    return sum(row.is_off for row in rows) + too_much


def compare_all(files: list[Path], device: str, hardware: str, small: bool) -> int:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        failed = sum(compared(file, device, hardware) for file in files or made(Path(folder), small))
    print(json.dumps({"failed": failed, "seconds": round(time.perf_counter() - began, 1)}))
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--on", default="1xH200", help="hardware of the plan")
    parser.add_argument("--small", action="store_true", help="four layers of each made model")
    options = parser.parse_args()
    return min(compare_all(options.files, options.device, options.on, options.small), 1)


if __name__ == "__main__":
    sys.exit(main())
