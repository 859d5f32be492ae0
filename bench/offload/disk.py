"""A model larger than --host-memory: what it reads from disk against what the disk gives, memory against the cap, and the same tokens.

    python bench/offload/disk.py --model Llama-3.1-8B --quant int4 --host-memory 3.5GB --folder DIR

The disk is measured with fio (or, without it, with our own reader) right before and after the decode steps, on the same file, past the page
cache. Only bytes that a step needed count as read; experts that were guessed wrongly do not. Memory is the highest resident size of the
process. Tokens are compared with a run that has all weights in memory, unless --no-compare; what that run takes for a step is the time that
reads could at best be hidden behind.

Mixtures: --temperature 100 makes all tokens about equally likely, so that other experts are needed for each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec

from windlass.core.launch import Launch, RandomInit
from windlass.core.request import Sampling
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


COUNTED = ("read_bytes", "read_seconds", "expert_hits", "expert_misses", "expert_foreseen")


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
    from windlass.runtime.offload.tiers.reader import DirectReader, sequential_speed

    reader = DirectReader(os.open(file, os.O_RDONLY | os.O_DIRECT), str(file))
    try:
        return sequential_speed(reader, file.stat().st_size, seconds)
    finally:
        reader.close()


def speeds(file: Path, seconds: float) -> dict[str, float]:
    """fio, and our reader without a model: its buffers are in huge pages, which a virtual disk fills faster."""
    return {**fio_speeds(file, seconds), "our reader": own_speed(file, seconds)}


def decode(
    launch: Launch, prompt: list[int], steps: int, batch: int, rounds: int, temperature: float, guesses: bool, pipe: Any
) -> None:
    """In a process of its own, whose memory is that of the model alone. Decodes `steps` steps whenever it is told to."""
    from windlass.runtime.engine.load import load_model
    from windlass.runtime.engine.protocol import Submit
    from windlass.runtime.machine.memory import process_memory
    from windlass.runtime.offload.experts.experts import DiskExperts

    if not guesses:
        DiskExperts.foresee = lambda *_: None
    began = time.perf_counter()
    engine, info = load_model(launch)
    loaded, load_peak = time.perf_counter() - began, process_memory().peak_bytes
    for number in range(batch):
        request = [token + number for token in prompt]
        # Sampled: random weights repeat one token otherwise, and a mixture the same few experts.
        sampling = Sampling(temperature=temperature, seed=number)
        engine.submit(Submit(id=number, token_ids=request, sampling=sampling, max_tokens=steps * rounds + 4, logprobs=0))
    tokens: list[Any] = []

    def step() -> None:
        tokens.extend((out.id, out.token_ids[0], out.logprobs[0].logprob) for out in engine.step() if out.token_ids)

    while len(tokens) < 3 * batch:
        step()
    tier = getattr(engine.runner.decoder, "tier", None)
    pipe.send(
        {
            "load_seconds": loaded,
            "weights_bytes": info.weights_bytes,
            "line": info.details.get("offload", ""),
            "load_peak": load_peak,
        }
    )
    while pipe.recv() == "go":
        before, began = tier.stats() if tier else None, time.perf_counter()
        for _ in range(steps):
            step()
        seconds, after = time.perf_counter() - began, tier.stats() if tier else None
        counts = {name: getattr(after, name) - getattr(before, name) if tier else 0 for name in COUNTED}
        pipe.send({"seconds": seconds, "needed_bytes": needed_bytes(tier, counts, steps), **counts})
    placed = None if tier is None else tier.placed.step_seconds
    pipe.send({"tokens": tokens, "peak": process_memory().peak_bytes, "predicted": placed})
    engine.close()


def needed_bytes(tier: Any, counts: dict[str, Any], steps: int) -> int:
    """Experts that were chosen and not in memory, and matrices that are read in every step."""
    if tier is None:
        return 0
    streamed = 0 if tier.stream is None else sum(block.num_bytes for block in tier.stream.blocks)
    return counts["expert_misses"] * tier.placed.expert_bytes + steps * streamed


class Decoding:
    """A process that decodes on demand."""

    def __init__(self, launch: Launch, options: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        prompt = [(17 * number) % 1000 for number in range(options.prompt_tokens)]
        arguments = (launch, prompt, options.steps, options.batch, options.rounds)
        arguments = (*arguments, options.temperature, not options.no_guesses, theirs)
        self._process = context.Process(target=decode, args=arguments)
        self._process.start()
        self.ready = self._pipe.recv()

    def go(self) -> dict[str, Any]:
        self._pipe.send("go")
        return self._pipe.recv()

    def end(self) -> dict[str, Any]:
        self._pipe.send("end")
        found = self._pipe.recv()
        self._process.join()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Llama-3.1-8B")
    parser.add_argument("--quant", default="int4")
    parser.add_argument("--host-memory", default="3.5GB")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6, help="decode steps of a round")
    parser.add_argument("--rounds", type=int, default=4, help="the disk is measured before, between and after")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--disk-seconds", type=float, default=2)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--no-guesses", action="store_true", help="experts are read when they are chosen, not before")
    parser.add_argument("--no-compare", action="store_true")
    options = parser.parse_args()
    from windlass.open.resolve import model_config

    config, label = model_config(options.model)
    cap = parse_bytes(options.host_memory)
    launch = Launch(
        model=label,
        device="cpu",
        random_weights=RandomInit(config=config, scheme=options.quant),
        context_tokens=options.prompt_tokens + options.steps * options.rounds + 8,
        max_sequences=options.batch,
        host_memory=cap,
        disk_folder=str(options.folder),
    )
    first = Decoding(launch, options)  # writes the file, if it is not there; the next start finds it
    print(f"first start: {first.ready['load_seconds']:.1f} s, highest resident memory {format_bytes(first.end()['peak'])}")
    file = max(options.folder.glob("*.tier"), key=lambda path: path.stat().st_mtime)
    decoding = Decoding(launch, options)
    disk, found = [speeds(file, options.disk_seconds)], []
    for _ in range(options.rounds):
        found.append(decoding.go())
        disk.append(speeds(file, options.disk_seconds))
    ended = decoding.end()
    print(decoding.ready["line"])
    print(
        f"weights {format_bytes(decoding.ready['weights_bytes'])}, cap {format_bytes(cap)}; started in {decoding.ready['load_seconds']:.1f} s"
    )
    print(f"highest resident memory {format_bytes(ended['peak'])} (while loading {format_bytes(decoding.ready['load_peak'])})")
    for number, one in enumerate(disk):
        print("disk: " + ", ".join(f"{name} {speed / 1e9:.2f} GB/s" for name, speed in one.items()))
        if number < len(found):
            run = found[number]
            reached = run["needed_bytes"] / run["seconds"]
            fio = [speed for near in disk[number : number + 2] for name, speed in near.items() if name.startswith("fio")]
            ours = [near["our reader"] for near in disk[number : number + 2]]
            shares = f"{reached / max(fio):.0%} of the fastest fio around it, " if fio else ""
            print(
                f"  decode: {run['seconds'] / options.steps * 1e3:.0f} ms a step, {reached / 1e9:.2f} GB/s from disk, {shares}"
                f"{reached / max(ours):.0%} of our reader's best; reads in flight {run['read_seconds'] / run['seconds']:.0%} of the time"
            )
            if run["expert_hits"] + run["expert_misses"]:
                print(
                    f"  experts found in memory: {run['expert_hits'] / (run['expert_hits'] + run['expert_misses']):.1%}; of the others "
                    f"{run['expert_foreseen'] / max(run['expert_misses'], 1):.0%} were on their way; {run['needed_bytes'] / options.steps / 1e6:.0f} "
                    f"of {run['read_bytes'] / options.steps / 1e6:.0f} MB a step were needed"
                )
    seconds = statistics.median(run["seconds"] / options.steps for run in found)
    print(f"median step {seconds * 1e3:.0f} ms, predicted {ended['predicted'] * 1e3:.0f} ms from what the disk read at the start")
    if not options.no_compare:
        alone = Decoding(msgspec.structs.replace(launch, host_memory=None, disk_folder=None), options)
        runs = [alone.go() for _ in range(options.rounds)]
        print(f"same tokens and log-probabilities as with all weights in memory: {alone.end()['tokens'] == ended['tokens']}")
        computing = statistics.median(run["seconds"] / options.steps for run in runs)
        print(f"median step with all weights in memory: {computing * 1e3:.0f} ms")
        for number, run in enumerate(found):
            reading = run["needed_bytes"] / options.steps / max(one["our reader"] for one in disk[number : number + 2])
            taken = run["seconds"] / options.steps
            print(
                f"  needed bytes take our reader {reading * 1e3:.0f} ms: {max(reading, computing) * 1e3:.0f} ms a step if all of it overlapped "
                f"({max(reading, computing) / taken:.0%} reached), {(reading + computing) * 1e3:.0f} ms if nothing did"
            )


if __name__ == "__main__":
    main()
