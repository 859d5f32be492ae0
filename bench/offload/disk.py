"""A model larger than --host-memory: what it reads from disk against what the disk gives, memory against the cap, and the same tokens.

    python bench/offload/disk.py --model Llama-3.1-8B --quant int4 --host-memory 3.5GB --folder DIR

The disk is measured with fio (or, without it, with our own reader) right before and after the decode steps, on the same file, past the page
cache. Memory is the highest resident size of the process. Tokens are compared with a run that has all weights in memory, unless
--no-compare.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from windlass.core.launch import Launch, RandomInit
from windlass.core.request import GREEDY
from windlass.units import format_bytes, parse_bytes

FIO = (
    "fio --name=r --filename={file} --rw=read --direct=1 --ioengine={engine} --bs=1m --time_based --runtime={seconds} "
    "--group_reporting --output-format=json --readonly"
)
WAYS = {
    "fio io_uring, depth 16": ("io_uring", "--iodepth=16"),
    "fio 8 threads": ("psync", "--numjobs=8 --thread --offset_increment=10%"),
    "fio 4 threads": ("psync", "--numjobs=4 --thread --offset_increment=20%"),
}


def fio_speeds(file: Path, seconds: float) -> dict[str, float]:
    """Bytes per second, by way of reading; empty without fio."""
    if shutil.which("fio") is None:
        return {}
    found: dict[str, float] = {}
    for name, (engine, more) in WAYS.items():
        command = FIO.format(file=file, engine=engine, seconds=seconds).split() + more.split()
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode == 0:
            found[name] = json.loads(made.stdout)["jobs"][0]["read"]["bw_bytes"]
    return found


def own_speed(file: Path, seconds: float) -> float:
    import os

    from windlass.offload.tiers.memory import page_aligned, view
    from windlass.offload.tiers.reader import DirectReader, wait

    size, memory = file.stat().st_size // 2**23 * 2**23, page_aligned(2**24)
    reader = DirectReader(os.open(file, os.O_RDONLY | os.O_DIRECT), str(file))
    began, at, half, waiting = time.perf_counter(), 0, 0, [[], []]
    while time.perf_counter() - began < seconds:
        wait(waiting[half])
        waiting[half] = reader.read(at, view(memory[half * 2**23 : (half + 1) * 2**23]))
        at, half = (at + 2**23) % size, 1 - half
    for reads in waiting:
        wait(reads)
    spent = time.perf_counter() - began
    total = reader.counts.num_bytes
    reader.close()
    return total / spent


def speeds(file: Path, seconds: float) -> dict[str, float]:
    """fio, and our reader without a model: its buffers are in huge pages, which a virtual disk fills faster."""
    return {**fio_speeds(file, seconds), "our reader": own_speed(file, seconds)}


def decode(launch: Launch, prompt: list[int], steps: int, batch: int, queue: Any) -> None:
    """In a process of its own, whose memory is that of the model alone."""
    from windlass.engine.load import load_model
    from windlass.engine.protocol import Submit
    from windlass.machine.memory import process_memory

    began = time.perf_counter()
    engine, info = load_model(launch)
    loaded = time.perf_counter() - began
    load_peak = process_memory().peak_bytes
    for number in range(batch):
        engine.submit(
            Submit(id=number, token_ids=[token + number for token in prompt], sampling=GREEDY, max_tokens=steps + 4, logprobs=0)
        )
    tokens: list[Any] = []
    warm = 3
    while len(tokens) < warm * batch:
        tokens += [(out.id, out.token_ids[0], out.logprobs[0].logprob) for out in engine.step() if out.token_ids]
    tier = getattr(engine.runner.decoder, "tier", None)
    before, began, walls = tier.stats() if tier else None, time.perf_counter(), []
    queue.put("decoding")
    for _ in range(steps):
        at = time.perf_counter()
        tokens += [(out.id, out.token_ids[0], out.logprobs[0].logprob) for out in engine.step() if out.token_ids]
        walls.append(time.perf_counter() - at)
    seconds = time.perf_counter() - began
    after = tier.stats() if tier else None
    queue.put(
        {
            "tokens": tokens,
            "load_seconds": loaded,
            "seconds": seconds,
            "steps": steps,
            "read_bytes": after.read_bytes - before.read_bytes if after and before else 0,
            "hits": after.expert_hits - before.expert_hits if after and before else 0,
            "misses": after.expert_misses - before.expert_misses if after and before else 0,
            "peak_bytes": process_memory().peak_bytes,
            "load_peak_bytes": load_peak,
            "weights_bytes": info.weights_bytes,
            "placement": None if tier is None else tier.placed.step_seconds,
            "line": info.details.get("offload", ""),
        }
    )
    engine.close()


def in_process(launch: Launch, prompt: list[int], steps: int, batch: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=decode, args=(launch, prompt, steps, batch, queue))
    process.start()
    queue.get()
    found = queue.get()
    process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Llama-3.1-8B")
    parser.add_argument("--quant", default="int4")
    parser.add_argument("--host-memory", default="3.5GB")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--fio-seconds", type=float, default=5)
    parser.add_argument("--no-compare", action="store_true")
    options = parser.parse_args()
    from windlass.open.resolve import model_config

    config, label = model_config(options.model)
    cap = parse_bytes(options.host_memory)
    tokens = options.prompt_tokens + options.steps + 8
    launch = Launch(
        model=label,
        device="cpu",
        random_weights=RandomInit(config=config, scheme=options.quant),
        context_tokens=tokens,
        max_sequences=options.batch,
        host_memory=cap,
        disk_folder=str(options.folder),
    )
    prompt = [(17 * number) % 1000 for number in range(options.prompt_tokens)]
    in_process(launch, prompt, 1, options.batch)  # writes the file; the next start finds it
    file = max(options.folder.glob("*.tier"), key=lambda path: path.stat().st_mtime)
    disk = [speeds(file, options.fio_seconds)]
    found = in_process(launch, prompt, options.steps, options.batch)
    disk.append(speeds(file, options.fio_seconds))
    reached = found["read_bytes"] / found["seconds"]
    fastest = max(max(one.values()) for one in disk)
    print(found["line"])
    print(f"weights {format_bytes(found['weights_bytes'])}, cap {format_bytes(cap)}; loaded in {found['load_seconds']:.1f} s")
    print(f"highest resident memory {format_bytes(found['peak_bytes'])} (while loading {format_bytes(found['load_peak_bytes'])})")
    step = found["seconds"] / found["steps"]
    print(f"step {step * 1e3:.1f} ms ({options.batch / step:.2f} tokens/s), predicted {found['placement'] * 1e3:.1f} ms")
    for when, one in zip(("before", "after"), disk, strict=True):
        print(f"disk {when}: " + ", ".join(f"{name} {speed / 1e9:.2f} GB/s" for name, speed in one.items()))
    print(f"read from disk while decoding: {reached / 1e9:.2f} GB/s, {reached / fastest:.0%} of the fastest of these")
    if found["hits"] + found["misses"]:
        print(f"experts found in memory: {found['hits'] / (found['hits'] + found['misses']):.1%}")
    if not options.no_compare:
        import msgspec

        alone = in_process(
            msgspec.structs.replace(launch, host_memory=None, disk_folder=None), prompt, options.steps, options.batch
        )
        print(f"same tokens and log-probabilities as with all weights in memory: {alone['tokens'] == found['tokens']}")
        print(f"step with all weights in memory: {alone['seconds'] / alone['steps'] * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
