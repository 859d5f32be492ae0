"""Experts on disk below host memory, beside a GPU: how much of each cap is used, and what a step was predicted to take. Random weights.

Each cap is a process of its own, so that its highest resident memory is its own. Decode is counted without the prompt, which finds the cache cold.
Run: PYTHONPATH=src:bench/h200 python bench/h200/below.py --layers 14 --gpu-memory 14GB --host-memory 12GB,8GB --disk-folder DIR
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

import msgspec
import torch
from engine_speed import shape_of

from windlass.core.launch import Launch, RandomInit
from windlass.core.request import GREEDY
from windlass.core.tiers.device import DevicePlan
from windlass.core.tiers.placement import predicted_seconds
from windlass.core.tiers.values import Speeds
from windlass.runtime.engine import tiers
from windlass.runtime.engine.engine import Engine
from windlass.runtime.engine.load import build, make_engine, with_limits
from windlass.runtime.engine.protocol import Submit
from windlass.runtime.offload.device.weights import DeviceTier
from windlass.units import parse_bytes

GIB = 2**30
PROMPT = 16


class Counts(NamedTuple):
    seconds: float
    read_bytes: int
    read_seconds: float
    hits: int
    misses: int
    busy_seconds: float
    num_bytes: int

    def since(self, before: Counts) -> Counts:
        return Counts(*(now - then for now, then in zip(self, before, strict=True)))


def counts(tier: DeviceTier) -> Counts:
    stats, disk = tier.stats(), tier._memory.disk
    found = disk.cache.counts if disk is not None else (0, 0, 0)
    share = tier.share.counts if tier.share is not None else (0.0, 0)
    return Counts(time.perf_counter(), stats.read_bytes, stats.read_seconds, found[0], found[1], share[0], share[1])


def one_cap(options: argparse.Namespace) -> None:
    placed: list[Any] = []
    place = tiers.placed_below
    tiers.placed_below = lambda *given: placed.append((*place(*given), given[3])) or placed[-1][:2]
    config, _ = shape_of(options.model, options.layers)
    cap = parse_bytes(options.host_memory)
    launch = Launch(
        model=options.model,
        device="cuda",
        random_weights=RandomInit(config=config, scheme="int4", group=128),
        gpu_memory=(parse_bytes(options.gpu_memory),),
        host_memory=cap,
        disk_folder=options.disk_folder,
    )
    began = time.perf_counter()
    built = build(launch, "cuda")
    plan, _, host = placed[-1]
    print(f"\ncap {cap / GIB:.2f} GiB: {built.offloaded}; weights after {time.perf_counter() - began:.1f} s", flush=True)
    tier: Any = built.decoder.tier
    speeds, loaded = tier.speeds, resident()
    rates = (
        ", ".join(f"{tier.burst_speed(count) / 1e9:.2f} of {count}" for count in (1, 2, 4, 8)) if tier.reads_disk else "no disk"
    )
    print(
        f"  process {host.used_bytes / GIB:.2f} GiB before loading, {loaded:.2f} at most after it; link {speeds.link / 1e9:.1f}, CPU "
        f"{speeds.host / 1e9:.1f} GB/s; bursts {rates}; in order {tier.measure().disk / 1e9:.2f} GB/s",
        flush=True,
    )
    engine = make_engine(with_limits(launch, built), built.decoder, "cuda")
    engine.warm_up()
    for batch in map(int, options.batch.split(",")):
        decode(engine, tier, plan, speeds, batch, options.new)
    prefill(engine, options.prompt)
    used = plan.host_bytes / GIB
    print(
        f"  host memory at most {resident():.2f} of {cap / GIB:.2f} GiB: {used:.2f} for experts, {resident() - used:.2f} beside",
        flush=True,
    )
    engine.close()
    tier.close()


def decode(engine: Engine, tier: DeviceTier, plan: DevicePlan, speeds: Speeds, batch: int, new: int) -> None:
    source = torch.Generator().manual_seed(batch)
    for number in range(batch):
        tokens = torch.randint(0, engine.num_tokens, (PROMPT,), generator=source).tolist()
        engine.submit(Submit(id=number + 1, token_ids=tokens, sampling=GREEDY, max_tokens=new))
    times, done, began = list[float](), 0, counts(tier)
    prompt = began
    while done < batch:
        before = time.perf_counter()
        outputs = engine.step()
        done += sum(output.finish is not None for output in outputs)
        if sum(len(output.token_ids) for output in outputs) < batch:
            continue
        if prompt is began:
            prompt = counts(tier)
        else:
            times.append(time.perf_counter() - before)
    found, cold = counts(tier).since(prompt), prompt.since(began)
    mean, median = found.seconds / len(times), sorted(times)[len(times) // 2]
    own = own_prediction(plan, speeds, found.read_bytes / len(times))
    rate = found.read_bytes / found.read_seconds / 1e9 if found.read_seconds else 0.0
    print(
        f"  batch {batch}: {batch / mean:.2f} tokens/s, {mean * 1e3:.1f} ms a step in the mean of {len(times)} (median {median * 1e3:.1f}); "
        f"predicted {plan.placed(speeds).step_seconds * 1e3 if batch == 1 else 0:.1f}, with what was read {own * 1e3 if batch == 1 else 0:.1f}\n"
        f"    read {found.read_bytes / len(times) / plan.expert_bytes:.1f} experts a step at {rate:.2f} GB/s, in flight "
        f"{found.read_seconds / found.seconds:.0%}; found {found.hits / max(found.hits + found.misses, 1):.0%} of uses of experts on disk; "
        f"CPU {found.num_bytes / max(found.busy_seconds, 1e-9) / 1e9:.1f} GB/s while busy {found.busy_seconds / found.seconds:.0%}\n"
        f"    the prompt before: {cold.read_bytes / 1e9:.2f} GB read in {cold.seconds:.2f} s",
        flush=True,
    )


def own_prediction(plan: DevicePlan, speeds: Speeds, read_bytes: float) -> float:
    """With as many misses as there were, instead of those of even routing."""
    placed, pool = plan.placed(speeds), plan.demand.experts
    assert pool is not None
    missing = round(read_bytes / (pool.touched * pool.expert_bytes))
    more = placed.num_experts - placed.device_slots - missing - placed.host_slots
    changed = msgspec.structs.replace(placed, host_slots=placed.host_slots + more, cache_slots=max(placed.cache_slots + more, 0))
    return predicted_seconds(plan.demand, changed, speeds)


def prefill(engine: Engine, tokens: int) -> None:
    prompt = torch.randint(0, engine.num_tokens, (tokens,), generator=torch.Generator().manual_seed(3)).tolist()
    began = time.perf_counter()
    engine.submit(Submit(id=10**6, token_ids=prompt, sampling=GREEDY, max_tokens=1))
    while not any(output.finish is not None for output in engine.step()):
        pass
    print(f"  prompt of {tokens}: {tokens / (time.perf_counter() - began):,.0f} tokens/s", flush=True)


def resident() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="GLM-4.5-Air")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", default="1")
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=1536)
    parser.add_argument("--gpu-memory", default="14GB")
    parser.add_argument("--host-memory", default="12GB,8GB", help="caps, one after another")
    parser.add_argument("--disk-folder", required=True)
    options = parser.parse_args()
    caps = options.host_memory.split(",")
    if len(caps) == 1:
        one_cap(options)
        return 0
    given = [f"--{name.replace('_', '-')}={value}" for name, value in vars(options).items() if value is not None]
    failed = 0
    for cap in caps:
        with tempfile.TemporaryDirectory(dir=options.disk_folder) as folder:
            one = [*given, f"--host-memory={cap}", f"--disk-folder={folder}"]
            failed |= subprocess.run([sys.executable, __file__, *one], check=False).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
