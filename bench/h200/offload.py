"""Models larger than the GPU: experts in host memory beside it, and on disk below. Random weights with even routing, through the Engine.

check  the same logits as with all experts on the device, for several splits; with --disk-folder some experts are on disk
table  tokens/s of decode and prefill, bytes by tier, and what the link, the CPU and the disk gave
Run: PYTHONPATH=src:bench/h200 python bench/h200/offload.py check table --model GLM-4.6 --batch 1,8,64
     PYTHONPATH=src:bench/h200 python bench/h200/offload.py check table --layers 14 --gpu-memory 14GB --host-memory 12GB --disk-folder DIR \
         --batch 1,8 --new 16 --prompt 1536
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path

import torch
from engine_speed import make_step, shape_of

from windlass.core.fused import BLOCK_INPUTS, slice_blocks
from windlass.core.launch import Launch, RandomInit
from windlass.core.request import GREEDY
from windlass.core.scheme import scheme
from windlass.core.tiers.device import DeviceSplit
from windlass.core.tiers.values import Speeds
from windlass.model.families import rules
from windlass.runtime.engine.engine import Engine
from windlass.runtime.engine.load import build, make_engine, with_limits
from windlass.runtime.engine.protocol import Submit
from windlass.runtime.kernels.step import BLOCK_TOKENS
from windlass.runtime.nn.decoder import Decoder
from windlass.runtime.nn.fused.feed_forward import OffloadedFeed
from windlass.runtime.offload.device import dense, weights
from windlass.runtime.offload.device.dense import DenseTieredWeights
from windlass.runtime.offload.device.disk import DiskPlace
from windlass.runtime.offload.device.weights import DeviceTier, DeviceTieredWeights
from windlass.runtime.weights.load.random import RandomWeights
from windlass.units import parse_bytes


def check(name: str, layers: int, folder: str | None) -> None:
    _, spec = shape_of(name, layers)
    moe = spec.experts
    assert moe is not None
    first = next(i for i, layer in enumerate(spec.layers) if layer.feed_forward == moe)

    def random() -> RandomWeights:
        return RandomWeights(spec, rules(spec), quant=scheme("int4", 128), device="cuda", tiled=True)

    tokens = torch.randint(0, spec.vocab_size, (64, 24), dtype=torch.int32)
    whole = logits(Decoder(spec, random(), 4096), tokens)
    again = logits(Decoder(spec, random(), 4096), tokens)
    print("whole again:", differences(whole, again), flush=True)
    for on_device, share in ((moe.num_experts * 2 // 3, 0.6), (moe.num_experts // 4, 0.0), (moe.num_experts // 4, 1.0), (0, 0.4)):
        split = DeviceSplit(layers - first, moe.num_experts, on_device, moe.shared_intermediate_size > 0, share)
        source = DeviceTieredWeights(random(), split, first)
        decoder = Decoder(spec, source, 4096)
        decoder.tier = source.finish()
        print(f"{on_device} experts on the device, CPU's part {share}:", differences(whole, logits(decoder, tokens)), flush=True)
        decoder.tier.close()
        if folder is not None:
            break  # one split without a disk is enough beside those with one
    for on_device, on_disk, slots, share in (
        ((40, 60, 30, 0.6), (0, 128, 8, 1.0), (100, 10, 25, 0.0)) if folder is not None else ()
    ):
        split = DeviceSplit(layers - first, moe.num_experts, on_device, moe.shared_intermediate_size > 0, share, on_disk, slots)
        place = DiskPlace(Path(folder or ""), "check", keep=False, bytes_per_second=1e9)
        source = DeviceTieredWeights(random(), split, first, place)
        decoder = Decoder(spec, source, 4096)
        tier = decoder.tier = source.finish()
        found = differences(whole, logits(decoder, tokens))
        tier.after_step()
        stats = tier.stats()
        print(f"{on_device} on the device, {on_disk} on disk, {slots} slots, CPU's part {share}:", found, flush=True)
        host = stats.expert_misses - stats.expert_reads
        print(
            f"  {stats.expert_hits:,} uses on the device, {host:,} in host memory, {stats.expert_reads:,} read; "
            f"{stats.read_bytes / 1e9:.1f} GB at {(stats.read_bytes_per_second or 0) / 1e9:.2f} GB/s",
            flush=True,
        )
        tier.close()


def check_dense(name: str, layers: int) -> None:
    _, spec = shape_of(name, layers)
    blocks = spec.layers[0].feed_forward.intermediate_size // BLOCK_INPUTS
    slices = blocks // slice_blocks(blocks)

    def random() -> RandomWeights:
        return RandomWeights(spec, rules(spec), quant=scheme("int4", 128), device="cuda", tiled=True)

    tokens = torch.randint(0, spec.vocab_size, (64, 24), dtype=torch.int32)
    whole = logits(Decoder(spec, random(), 4096), tokens)
    for on_device, share in ((slices // 2, 0.6), (slices // 4, 0.0), (slices // 4, 1.0), (0, 0.4)):
        source = DenseTieredWeights(random(), DeviceSplit(layers, slices, on_device, False, share))
        decoder = Decoder(spec, source, 4096)
        decoder.tier = source.finish()
        print(
            f"{on_device} of {slices} slices on the device, CPU's part {share}:",
            differences(whole, logits(decoder, tokens)),
            flush=True,
        )
        decoder.tier.close()


def logits(decoder: Decoder, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of the last token of prompts in one wide step, then of decode steps of 1, 8 and 64 rows."""
    found = {}
    pages = -(-tokens.shape[1] // BLOCK_TOKENS)
    with torch.inference_mode():
        for rows in (1, 8, 64):
            caches = decoder.make_caches(rows * pages, device="cuda")
            some = tokens[:rows]
            found[f"prompts of {rows}"] = decoder(make_step(some, 0, tokens.shape[1] - 1, pages), caches).clone()
            step = make_step(some, tokens.shape[1] - 1, tokens.shape[1], pages)
            for attempt in range(2):
                found[f"{rows} rows, {attempt}"] = decoder(step, caches).clone()
    return found


def differences(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> str:
    """Median and worst relative difference of a row; near ties between experts stand out in the worst."""

    def one(key: str) -> str:
        error = (found[key].double() - expected[key].double()).norm(dim=-1) / expected[key].double().norm(dim=-1)
        return f"{key}: {error.median():.1e} {error.max():.1e}"

    return "; ".join(one(key) for key in expected)


def decode(engine: Engine, batch: int, new: int, prompt: int = 16) -> tuple[float, int]:
    """Seconds of a step in which all decode, and of how many it is the median."""
    source = torch.Generator().manual_seed(batch)
    for number in range(batch):
        tokens = torch.randint(0, engine.num_tokens, (prompt,), generator=source).tolist()
        engine.submit(Submit(id=number + 1, token_ids=tokens, sampling=GREEDY, max_tokens=new))
    times, done = [], 0
    last = time.perf_counter()
    while done < batch:
        outputs = engine.step()
        now = time.perf_counter()
        if sum(len(output.token_ids) for output in outputs) == batch:
            times.append(now - last)
        done += sum(output.finish is not None for output in outputs)
        last = now
    times = sorted(times[4:])
    return times[len(times) // 2], len(times)


def profile(engine: Engine) -> None:
    """Of some decode steps of one sequence."""
    engine.submit(Submit(id=10**7, token_ids=list(range(16)), sampling=GREEDY, max_tokens=12))
    for _ in range(4):
        engine.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(4):
            engine.step()
        torch.cuda.synchronize()
    while not any(output.finish is not None for output in engine.step()):
        pass
    for row in sorted(found.key_averages(), key=lambda r: -r.device_time_total)[:14]:
        print(f"     {row.key[:60]:60s} {row.count:5d} x {row.device_time_total / row.count:8.1f} us", flush=True)


def prefill(engine: Engine, tokens: int, seed: int) -> float:
    source = torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, engine.num_tokens, (tokens,), generator=source).tolist()
    began = time.perf_counter()
    engine.submit(Submit(id=10**6, token_ids=prompt, sampling=GREEDY, max_tokens=1))
    while not any(output.finish is not None for output in engine.step()):
        pass
    return time.perf_counter() - began


def table(name: str, options: argparse.Namespace) -> None:
    config, _ = shape_of(name, options.layers)
    launch = Launch(
        model=name,
        device="cuda",
        random_weights=RandomInit(config=config, scheme="int4", group=128),
        gpu_memory=(parse_bytes(options.gpu_memory),) if options.gpu_memory else (),
        host_memory=parse_bytes(options.host_memory) if options.host_memory else None,
        disk_folder=options.disk_folder,
    )
    began = time.perf_counter()
    built = build(launch, "cuda")
    print(f"{name}: {built.offloaded or 'all on the device'}; weights after {time.perf_counter() - began:.1f} s", flush=True)
    engine = make_engine(with_limits(launch, built), built.decoder, "cuda")
    measured = built.decoder.tier.measure() if built.decoder.tier is not None else None
    if measured is not None:
        print(f"  link {measured.link / 1e9:.1f} GB/s beside CPU kernels {measured.host / 1e9:.1f} GB/s", flush=True)
        if measured.disk:
            print(f"  disk: our reader alone {measured.disk / 1e9:.2f} GB/s in order; {resident()}", flush=True)
    began = time.perf_counter()
    engine.warm_up()
    limits = engine.limits
    print(
        f"  {limits.max_sequences} sequences, {limits.num_blocks * BLOCK_TOKENS:,} tokens of cache, "
        f"steps of {limits.max_step_tokens}, {engine.runner.mode}; warm after {time.perf_counter() - began:.1f} s; "
        f"{torch.cuda.memory_allocated() / 2**30:.1f} GiB allocated, "
        f"{torch.cuda.max_memory_allocated() / 2**30:.1f} at most, {torch.cuda.mem_get_info()[0] / 2**30:.1f} free",
        flush=True,
    )
    tier = built.decoder.tier
    if tier is not None and tier.placed is not None:
        print(f"  predicted {tier.placed.step_seconds * 1e3:.2f} ms a step of one sequence", flush=True)
    if options.skew:
        skewed(built.decoder, *map(float, options.skew.split(":")))
        for _ in range(6):
            before = counts(tier)
            seconds, _ = decode(engine, 1, 100)
            moved = tier.promotions.num_promoted if tier is not None and tier.promotions is not None else 0
            print(f"  skewed: {1 / seconds:6.2f} tokens/s{after(tier, before)}; {moved} experts promoted so far", flush=True)
    for batch in map(int, options.batch.split(",")):
        before, disk = counts(tier), disk_counts(tier)
        began = time.perf_counter()
        seconds, steps = decode(engine, batch, options.new)
        print(
            f"  batch {batch:3d}: {batch / seconds:7.2f} tokens/s, {seconds * 1e3:8.2f} ms a step (median of {steps}){after(tier, before)}"
            f"{disk_after(tier, disk, time.perf_counter() - began)}",
            flush=True,
        )
    if options.profile:
        profile(engine)
    for tokens in map(int, options.prompt.split(",")):
        if tokens <= limits.num_blocks * BLOCK_TOKENS:
            seconds = min(prefill(engine, tokens, tokens + seed) for seed in range(2))
            print(f"  prefill of {tokens}: {tokens / seconds:,.0f} tokens/s ({seconds:.2f} s)", flush=True)
    print(f"  {resident()}", flush=True)
    engine.close()
    if tier is not None:
        tier.close()


def skewed(decoder: Decoder, share: float, bias: float) -> None:
    """Some experts of each layer are preferred by the router's correction."""
    source = torch.Generator().manual_seed(5)
    for layer in decoder.fused.layers:  # type: ignore[union-attr]
        if getattr(layer.feed, "correction", None) is not None:
            correction = layer.feed.correction
            preferred = torch.randperm(len(correction), generator=source)[: int(share * len(correction))]
            correction[preferred.to(correction.device)] += bias


def resident() -> str:
    return f"host memory at most {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30:.2f} GiB"


def disk_counts(tier: DeviceTier | None) -> tuple[int, float, int, int]:
    stats = tier.stats() if tier is not None else None
    return (0, 0.0, 0, 0) if stats is None else (stats.read_bytes, stats.read_seconds, stats.expert_misses, stats.expert_reads)


def disk_after(tier: DeviceTier | None, before: tuple[int, float, int, int], seconds: float) -> str:
    """Since then, prompts included."""
    size, busy, misses, reads = (now - then for now, then in zip(disk_counts(tier), before, strict=True))
    if not size:
        return ""
    return (
        f"; {size / 1e9:.1f} GB from disk at {size / busy / 1e9:.2f} GB/s, reads in flight {busy / seconds:.0%} of the time; of {misses:,} uses "
        f"elsewhere {reads:,} were read"
    )


def counts(tier: DeviceTier | None) -> tuple[float, ...]:
    if tier is None:
        return 0.0, 0, 0, 0, 0, 0
    stats = tier.stats()
    share = tier.share.counts if tier.share is not None else (0.0, 0)
    return share[0], share[1], stats.expert_hits, stats.expert_misses, stats.expert_guesses, stats.expert_guessed_right


def after(tier: DeviceTier | None, before: tuple[float, ...]) -> str:
    if tier is None:
        return ""
    busy, num_bytes, hits, misses, guesses, right = (now - then for now, then in zip(counts(tier), before, strict=True))
    speed = f"CPU {num_bytes / busy / 1e9:.0f} GB/s of weights while busy {busy:.1f} s" if busy else "no CPU"
    guessed = f"; {right / guesses:.0%} of {guesses:,} guesses right" if guesses else ""
    return f"; {hits / max(hits + misses, 1):.0%} of {hits + misses:,} uses on the device; {speed}{guessed}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", choices=("check", "table"))
    parser.add_argument("--model", default="GLM-4.5-Air")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--new", type=int, default=40)
    parser.add_argument("--prompt", default="8192")
    parser.add_argument("--share", type=float, help="the CPU's part of experts in host memory")
    parser.add_argument("--skew", help="SHARE:BIAS: so many of the experts are preferred by the router, e.g. 0.25:0.2")
    parser.add_argument("--no-guesses", action="store_true", help="experts are fetched when they are chosen, not before")
    parser.add_argument("--profile", action="store_true", help="microseconds by kernel of a step")
    parser.add_argument("--gpu-memory")
    parser.add_argument("--host-memory")
    parser.add_argument("--disk-folder", help="experts that fit neither GPU nor host memory are kept here")
    options = parser.parse_args()
    OffloadedFeed.guesses = not options.no_guesses
    if options.share is not None:
        dense.measured_speeds = weights.measured_speeds = lambda *_, **__: Speeds(
            host=options.share, link=1 - options.share, disk=0.0
        )
    if "check" in options.what:
        is_dense = shape_of(options.model)[1].experts is None
        layers = 4 if options.disk_folder else options.layers or 4
        check_dense(options.model, layers) if is_dense else check(options.model, layers, options.disk_folder)
    if "table" in options.what:
        table(options.model, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
