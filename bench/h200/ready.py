"""How long a server takes until it is ready, and where the time goes: a checkpoint of the full shape in shared memory, served twice, first with no
kernel compiled, then with all of them.

starts  a timeline of both, from the command line to the first answer
imports which packages an engine process spends its imports on
profile where the main thread of a load with compiled kernels spends its time, in this process
check   three layers loaded in the background while graphs are captured: the same bits and the same tokens as loaded one after another
sweep   GB/s from files to tiles by threads and buffers
Run: PYTHONPATH=src:bench/h200 python bench/h200/ready.py [starts] [imports] [profile] [check] [sweep] [--model GLM-4.5-Air] [--folder /dev/shm/model]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import ctypes
import io
import json
import os
import pstats
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from made_checkpoint import make_checkpoint

from windlass.core.launch import Launch
from windlass.core.request import GREEDY
from windlass.runtime.engine.load import load_model
from windlass.runtime.engine.protocol import Submit
from windlass.runtime.engine.timeline import VARIABLE, Mark, parse
from windlass.runtime.kernels.cuda.layout import Tiles
from windlass.runtime.kernels.program import loader
from windlass.runtime.weights import CheckpointWeights, open_model
from windlass.tasks.bench.served.own_server import OwnServer

CHECKED_LAYERS = 3
SWEPT_LAYERS = range(1, 9)
SWEEP = ((4, 8), (8, 8), (12, 8), (16, 8), (12, 2), (12, 32))
"""Threads, MiB of a buffer."""
PROMPTS = ([5, 6, 7], list(range(100, 400)), [9] * 40)


# --- starts ----------------------------------------------------------------------------------------------------------


def starts(folder: Path) -> list[str]:
    lines: list[str] = []
    for which in ("nothing compiled", "all kernels compiled"):
        with tempfile.TemporaryDirectory() as made:
            lines += [which, *start(folder, Path(made) / "timeline")]
    return lines


def start(folder: Path, timeline: Path) -> list[str]:
    os.environ[VARIABLE] = str(timeline)
    server, began = OwnServer([str(folder)]), time.time()
    try:
        asyncio.run(server.start())
        ready = time.time()
        text = answer(server.url)
        answered = time.time()
    finally:
        server.stop()
        del os.environ[VARIABLE]
    marks = [*parse(timeline.read_text()), Mark(ready, 0, 0, "READY"), Mark(answered, 0, 0, f"answered: {text!r:.40}")]
    peak = max(mark.peak_bytes for mark in marks)
    last, lines = began, list[str]()
    for mark in marks:
        lines.append(f"  {mark.seconds - began:7.2f} s  {mark.seconds - last:+6.2f}  {mark.what}")
        last = mark.seconds
    return [*lines, f"  peak resident memory of the engine {peak / 2**30:.2f} GiB"]


def answer(url: str) -> str:
    body = {"prompt": "one two three", "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["text"]


# --- imports ---------------------------------------------------------------------------------------------------------


def imports(folder: Path) -> list[str]:
    """Self times by package, and the slowest modules. Without what is loaded beside them, which `starts` has."""
    del folder
    script = "import windlass.runtime.engine.loop, windlass.runtime.engine.load"
    text = subprocess.run([sys.executable, "-X", "importtime", "-c", script], check=True, capture_output=True, text=True).stderr
    rows = [
        line.removeprefix("import time:").split("|") for line in text.splitlines() if line.count("|") == 2 and "self" not in line
    ]
    modules = sorted(((int(own) / 1e6, name.strip()) for own, _, name in rows), reverse=True)
    packages: dict[str, float] = {}
    for seconds, name in modules:
        packages[name.split(".")[0]] = packages.get(name.split(".")[0], 0.0) + seconds
    most = sorted(packages.items(), key=lambda one: -one[1])[:6]
    return [
        f"imports {sum(packages.values()):.2f} s: " + ", ".join(f"{name} {seconds:.2f}" for name, seconds in most),
        "slowest modules: " + ", ".join(f"{name} {seconds:.2f}" for seconds, name in modules[:12]),
    ]


# --- profile ---------------------------------------------------------------------------------------------------------


def profile(folder: Path) -> list[str]:
    began, watched = time.perf_counter(), cProfile.Profile()
    engine, _ = watched.runcall(load_model, Launch(model=str(folder), device="cuda"))
    seconds = time.perf_counter() - began
    engine.close()
    del engine
    torch.cuda.empty_cache()
    text = io.StringIO()
    stats = pstats.Stats(watched, stream=text).strip_dirs()
    stats.sort_stats("tottime").print_stats(22)
    stats.sort_stats("cumtime").print_stats(r"load|warm_up|graphs|capture|prepare|engine|decoder.py|runner", 40)
    rows = [line for line in text.getvalue().splitlines() if line.strip()[:1].isdigit()]
    return [f"loaded in this process after {seconds:.1f} s, under a profiler (calls, own, per call, cumulative, per call)", *rows]


# --- check -----------------------------------------------------------------------------------------------------------


def check(folder: Path) -> list[str]:
    small = folder.with_name(folder.name + f"-{CHECKED_LAYERS}")
    if not small.is_dir():
        make_checkpoint(small, "GLM-4.5-Air", CHECKED_LAYERS)
    real, found = loader.available, list[tuple[dict[str, Any], list[list[int]], float]]()
    for way in (lambda: False, real):
        loader.available = way
        try:
            found.append(loaded(small))
        finally:
            loader.available = real
    (expected, tokens, slow), (arrived, same_tokens, fast) = found
    differ = [name for name, tensor in expected.items() if not torch.equal(tensor, arrived[name])]
    shutil.rmtree(small)
    return [
        f"{len(expected)} tensors of {CHECKED_LAYERS} layers, of which differ: {differ or 'none'}",
        f"greedy tokens {'the same' if tokens == same_tokens else f'DIFFER: {tokens} {same_tokens}'}",
        f"loaded and warm after {slow:.2f} s one after another, {fast:.2f} s in the background",
    ]


def loaded(folder: Path) -> tuple[dict[str, Any], list[list[int]], float]:
    began = time.perf_counter()
    engine, _ = load_model(Launch(model=str(folder), device="cuda", kv_bytes=2**30, max_sequences=16))
    seconds = time.perf_counter() - began
    decoder: Any = engine.runner.decoder
    tensors: dict[str, Any] = dict(decoder.state_dict())
    for name, module in decoder.named_modules():
        tensors |= {f"{name}.{key}": value.data for key, value in vars(module).items() if isinstance(value, Tiles)}
    assert engine.runner.mode == "CUDA graphs", engine.runner.mode  # a capture that failed is no error
    tokens: dict[int, list[int]] = {number: [] for number in range(len(PROMPTS))}
    for number, prompt in enumerate(PROMPTS):
        engine.submit(Submit(id=number, token_ids=prompt, sampling=GREEDY, max_tokens=12))
    while engine.has_work:
        for output in engine.step():
            tokens[output.id] += output.token_ids
    engine.close()
    del engine, decoder
    torch.cuda.empty_cache()
    return tensors, list(tokens.values()), seconds


# --- sweep -----------------------------------------------------------------------------------------------------------


def sweep(folder: Path) -> list[str]:
    opened, device = open_model(folder), torch.device("cuda")
    lines = [copied(device), one_after_another(opened)]
    lines.append(swept(opened, partial(OnlyRead, device, 12, 2**23), "12 threads, 8 MiB, only read"))
    for workers, mebibytes in SWEEP:
        side = partial(loader.CudaSide, device, workers, mebibytes * 2**20)
        lines.append(swept(opened, side, f"{workers} threads, {mebibytes} MiB"))
    opened.store.close()
    return lines


class OnlyRead(loader.CudaSide):
    """What the driver would do is left out."""

    def __init__(self, device: torch.device, workers: int, slot_bytes: int) -> None:
        super().__init__(device, workers, slot_bytes)
        nothing = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value  # returns 0
        self.functions = loader.Functions(*[nothing] * 5)


def swept(opened: Any, side: Callable[[], loader.DeviceSide], what: str) -> str:
    weights = CheckpointWeights(opened, device="cuda", tiled=True)
    began = time.perf_counter()
    weights.begin(side())
    prepared = time.perf_counter() - began
    kept = [weights.experts(layer, *parts) for layer in SWEPT_LAYERS for parts in (("gate", "up"), ("down",))]
    asked = time.perf_counter() - began - prepared
    weights.finish()
    state = weights.background_state
    assert state is not None
    seconds = state.last - state.first
    del kept
    return f"{what}: {state.num_bytes / seconds / 1e9:.1f} GB/s; {prepared:.2f} s for buffers, {asked:.2f} s of Python"


def one_after_another(opened: Any) -> str:
    weights, began = CheckpointWeights(opened, device="cuda", tiled=True), time.perf_counter()
    kept = [weights.experts(layer, *parts) for layer in (1, 2) for parts in (("gate", "up"), ("down",))]
    torch.cuda.synchronize()
    return f"one after another: {sum(one.num_bytes for one in kept) / (time.perf_counter() - began) / 1e9:.1f} GB/s"


def copied(device: torch.device) -> str:
    host, there = torch.empty(2**28, dtype=torch.uint8, pin_memory=True), torch.empty(2**28, dtype=torch.uint8, device=device)
    there.copy_(host)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(8):
        there.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return f"copies from pinned memory alone: {8 * host.numel() / (time.perf_counter() - began) / 1e9:.1f} GB/s"


PARTS: dict[str, Callable[[Path], list[str]]] = {
    "starts": starts,
    "imports": imports,
    "profile": profile,
    "check": check,
    "sweep": sweep,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="starts, imports, profile, check, sweep; all, if none is given")
    parser.add_argument("--model", default="GLM-4.5-Air")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm/model"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as caches:  # no kernel is compiled
        os.environ.update(XDG_CACHE_HOME=f"{caches}/kernels", TRITON_CACHE_DIR=f"{caches}/triton")
        return run(options)


def run(options: argparse.Namespace) -> int:
    lines, failed = list[str](), False
    if not options.folder.is_dir():
        began = time.perf_counter()
        make_checkpoint(options.folder, options.model, options.layers)
        size = sum(file.stat().st_size for file in options.folder.iterdir())
        lines.append(f"{size / 1e9:.1f} GB of {options.model} written in {time.perf_counter() - began:.1f} s")
    for part in options.parts or PARTS:
        began = time.perf_counter()
        try:
            lines += PARTS[part](options.folder)
        except Exception:  # noqa: BLE001 - the other parts are worth their time
            failed = True
            lines.append(f"{part} FAILED\n{traceback.format_exc()}")
        lines.append(f"({part}: {time.perf_counter() - began:.1f} s)")
        print(*lines, sep="\n", flush=True)
        lines.clear()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
