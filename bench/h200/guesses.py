"""What guessing the next layer's experts gains where some lie in host memory beside a GPU: on and off in one run, with the same weights.

Random weights, even routing, through the Engine with CUDA graphs; prompts of one token, so that nothing but decode steps is compiled. Tokens must be
the same either way. First: bytes per second of the kernel that fetches ahead, by its number of blocks, beside the one that fetches what is asked for.
Run: PYTHONPATH=src:bench/h200 python bench/h200/guesses.py --model GLM-4.6 --batch 1,8
     PYTHONPATH=src:bench/h200 python bench/h200/guesses.py --model GLM-4.5-Air --gpu-memory 24GB --host-memory 64GB --batch 1,8
Variants: --cpu-blocks 7 (of an expert, instead of what the measured speeds say), --ahead-blocks 24 (of the kernel that fetches ahead for one row).
The last lines are rows of docs/reference/offload.md: speeds of the machine, tokens/s without and with guesses, predicted and measured steps.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from engine_speed import shape_of

from windlass.core.launch import Launch, RandomInit
from windlass.core.layout import Layout
from windlass.core.place import place
from windlass.core.request import GREEDY
from windlass.core.scheme import scheme
from windlass.core.tiers import device, exchange
from windlass.core.tiers.demand import demand_of, planned_tensors
from windlass.core.tiers.placement import predicted_seconds
from windlass.model.families import rules
from windlass.runtime.engine.engine import Engine
from windlass.runtime.engine.execute.graphs import CapturedGraph
from windlass.runtime.engine.load import build, make_engine, with_limits
from windlass.runtime.engine.protocol import Submit
from windlass.runtime.kernels.cuda import driver, tiered
from windlass.runtime.kernels.cuda.tiered import FETCHED, STATE_WORDS
from windlass.runtime.machine.bandwidth import second_level_bytes
from windlass.runtime.machine.system import this_system
from windlass.runtime.nn.fused.feed_forward import OffloadedFeed
from windlass.runtime.offload.device.weights import DeviceTier
from windlass.units import parse_bytes

COUNTS, GUESSES = 6, 16
"""In the state (sources/offload.cu)."""


class Run(NamedTuple):
    seconds: float
    """Of a step, the median."""
    steps: int
    tokens: list[list[int]]
    stats: dict[str, float]


def launch_of(name: str, options: argparse.Namespace) -> Launch:
    config, _ = shape_of(name, options.layers)
    return Launch(
        model=name,
        device="cuda",
        random_weights=RandomInit(config=config, scheme="int4", group=128),
        gpu_memory=(parse_bytes(options.gpu_memory),) if options.gpu_memory else (),
        host_memory=parse_bytes(options.host_memory) if options.host_memory else None,
    )


def use_variant(options: argparse.Namespace) -> None:
    if options.ahead_blocks:
        tiered.AHEAD_BLOCKS = options.ahead_blocks
    if options.cpu_blocks is not None:
        device.cpu_blocks = exchange.cpu_blocks = lambda share, blocks: min(blocks, options.cpu_blocks)


def predicted_by(options: argparse.Namespace, tier: DeviceTier, batch: int, guesses: bool) -> float:
    """Seconds of a step, as the engine and the planner predict it from the measured speeds."""
    assert tier.placed is not None
    _, spec = shape_of(options.model, options.layers)
    table, how, layout = rules(spec), scheme("int4"), Layout()
    tensors = planned_tensors(table, spec, place(table, spec.num_layers, layout, how), layout, how, 0, (0, spec.num_layers))
    return predicted_seconds(demand_of(tensors, spec, batch=batch), tier.placed, tier.measure(), guesses=guesses)


def machine(tier: DeviceTier) -> str:
    """What a row of the guide says of it."""
    speeds, threads = tier.measure(), tier.share.shape.threads if tier.share is not None else 0
    blocks, of = tier._memory.share_blocks, tier._memory.slots.down.tile_blocks
    return (
        f"{torch.cuda.get_device_name()}, {this_system().cpu_model}: {threads} threads, {second_level_bytes() >> 10} KiB of second-level cache "
        f"each; link {speeds.link / 1e9:.1f} GB/s beside CPU kernels {speeds.host / 1e9:.1f}, the CPU has {blocks} of {of} blocks of an expert; "
        f"{tiered.AHEAD_BLOCKS} blocks fetch ahead"
    )


def speeds_by_blocks(decoder: Any) -> None:
    """GB/s over the link with nothing else under way."""
    feed = next(layer.feed for layer in decoder.fused.layers if isinstance(layer.feed, OffloadedFeed))
    tiles = feed._tiers
    state, count = tiles.state, min(8, tiles.slots.num_ahead)
    before = state.clone()
    places = torch.arange(count, dtype=torch.int32, device=state.device)
    state[COUNTS + tiles.layer % 2], state[FETCHED] = count, count
    state[GUESSES + tiles.layer % 2 * 16 :][:count] = places
    state[STATE_WORDS : STATE_WORDS + count] = places
    kept = tiered.AHEAD_BLOCKS

    def speed(run: Any) -> float:
        run()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(6):
            run()
        end.record()
        end.synchronize()
        return 6 * count * tiles.fetched_bytes / begin.elapsed_time(end) / 1e6

    found = [f"fetch {speed(tiles.fetch):.1f}"]
    for blocks in (8, 12, 24, 48, 64):
        tiered.AHEAD_BLOCKS = blocks
        found.append(f"{blocks} blocks ahead {speed(lambda: tiles._run_ahead(1)):.1f}")
    tiered.AHEAD_BLOCKS = kept
    state.copy_(before)
    print("  link, GB/s: " + ", ".join(found), flush=True)


def counted(tier: DeviceTier) -> dict[str, float]:
    stats, share = tier.stats(), tier.share.counts if tier.share is not None else None
    found = {name: float(getattr(stats, name)) for name in stats.__struct_fields__ if name.startswith(("expert_", "wasted"))}
    if share is not None:
        found |= {"busy": share.busy_seconds, "cpu": float(share.num_bytes), "cpu_ahead": float(share.ahead_bytes)}
    return found


def decode(engine: Engine, tier: DeviceTier, batch: int, new: int, before_step: Callable[[], object] = lambda: None) -> Run:
    source = torch.Generator().manual_seed(batch)
    tokens: dict[int, list[int]] = {number + 1: [] for number in range(batch)}
    for number in tokens:
        prompt = torch.randint(0, engine.num_tokens, (1,), generator=source).tolist()
        engine.submit(Submit(id=number, token_ids=prompt, sampling=GREEDY, max_tokens=new))
    times, done, last, before = [], 0, time.perf_counter(), counted(tier)
    while done < batch:
        before_step()
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            tokens[output.id] += output.token_ids
        if sum(len(output.token_ids) for output in outputs) == batch:
            times.append(now - last)
        done += sum(output.finish is not None for output in outputs)
        last = now
    after, times = counted(tier), sorted(times[4:])
    stats = {name: after[name] - before[name] for name in after}
    return Run(times[len(times) // 2], len(times), list(tokens.values()), stats | {"steps": float(new)})


def told(run: Run, tier: DeviceTier, batch: int, guesses: bool) -> str:
    s, speeds = run.stats, tier.measure()
    experts = max(s["cpu"], 1.0) / max(s["busy"], 1e-9) / 1e9
    missing = s["expert_misses"] / batch  # uses; experts where rows do not share them
    expert = sum(tiles.data[0].numel() for tiles in (tier._memory.slots.gate_up, tier._memory.slots.down))
    line = (
        f"  batch {batch:2d} guesses {'on ' if guesses else 'off'}: {batch / run.seconds:6.2f} tokens/s, {run.seconds * 1e3:7.2f} ms a step; "
        f"CPU {experts:.0f} GB/s while busy"
    )
    if batch == 1:
        share = missing * expert / s["steps"] / run.seconds / max(speeds.below_device, 1.0)
        line += f"; host memory read {share:.0%} of the time at {speeds.below_device / 1e9:.0f} GB/s"
    if s["expert_guesses"]:
        line += (
            f"; {s['expert_guessed_right'] / s['expert_guesses']:.0%} of {s['expert_guesses'] / s['steps']:.0f} guesses a step right, "
            f"{s['expert_foreseen'] / max(s['expert_misses'], 1):.0%} of misses foreseen, {s['wasted_bytes'] / s['steps'] / 1e6:.0f} MB in vain, "
            f"{s['cpu_ahead'] / s['steps'] / 1e6:.0f} MB into caches"
        )
    return line


CAPTURED: dict[bool, dict[tuple[int, int], CapturedGraph]] = {}
"""Graphs with and without guesses."""


def use_guesses(engine: Engine, wanted: bool) -> None:
    OffloadedFeed.guesses = wanted
    graphs = engine.runner._graphs
    assert graphs is not None
    torch.cuda.synchronize()
    graphs._graphs = CAPTURED.setdefault(wanted, {})


def profile(engine: Engine, tier: DeviceTier) -> None:
    """Microseconds by kernel of some steps of one sequence; kernels that wait for others count from their launch."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        decode(engine, tier, 1, 8)
        torch.cuda.synchronize()
    for row in sorted(found.key_averages(), key=lambda r: -r.device_time_total)[:14]:
        print(f"     {row.key[:60]:60s} {row.count:5d} x {row.device_time_total / row.count:8.1f} us", flush=True)


def opened(options: argparse.Namespace, batches: list[int], began: float) -> tuple[Engine, DeviceTier]:
    """An engine of which only decode steps of these batches are compiled; graphs are captured as they are needed."""
    launch = launch_of(options.model, options)
    built = build(launch, "cuda")
    decoder, tier = built.decoder, built.decoder.tier
    assert isinstance(tier, DeviceTier)
    speeds = tier.measure()
    print(f"{options.model}: {built.offloaded}; weights after {time.perf_counter() - began:.1f} s", flush=True)
    print(f"  link {speeds.link / 1e9:.1f} GB/s beside CPU kernels {speeds.host / 1e9:.1f} GB/s", flush=True)
    engine = make_engine(with_limits(launch, built), decoder, "cuda")
    graphs = engine.runner._graphs
    assert graphs is not None
    graphs._sizes = [*batches, *(size for size in graphs._sizes[-1:] if size > batches[-1])]
    steps = [step for step in graphs.usual_steps() if step.tokens.shape[0] in batches]
    with torch.inference_mode(), driver.collecting() as units:
        for step in steps:
            decoder.fused(step, engine.runner._caches)
    driver.compile_all(units)
    predicted = tier.placed.step_seconds if tier.placed is not None else 0.0
    print(
        f"  compiled after {time.perf_counter() - began:.1f} s; predicted {predicted * 1e3:.1f} ms a step of one sequence",
        flush=True,
    )
    return engine, tier


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="GLM-4.6")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", default="1,8")
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--cpu-blocks", type=int, help="of 128 intermediate outputs of an expert in host memory: the CPU's")
    parser.add_argument("--ahead-blocks", type=int, help="of the kernel that fetches ahead for one row")
    parser.add_argument("--gpu-memory")
    parser.add_argument("--host-memory")
    options = parser.parse_args()
    use_variant(options)
    began = time.perf_counter()
    batches = list(map(int, options.batch.split(",")))
    engine, tier = opened(options, batches, began)
    tier.promotions = None  # a swap would change who rounds what, and tokens with it
    speeds_by_blocks(engine.runner._decoder)
    lines, best = [], dict[tuple[int, bool], float]()
    expected: dict[int, list[list[int]]] = {}
    for number in range(2 * options.rounds):
        guesses = number % 2 == 1
        use_guesses(engine, guesses)
        for batch in batches:
            run = decode(engine, tier, batch, options.new if batch == 1 else options.new // 2)
            same = expected.setdefault(batch, run.tokens) == run.tokens
            lines.append(told(run, tier, batch, guesses) + ("" if same else "; OTHER TOKENS"))
            best[batch, guesses] = min(best.get((batch, guesses), 1e9), run.seconds)
            print(lines[-1], f"({time.perf_counter() - began:.0f} s)", flush=True)
        if options.profile and number < 2:
            profile(engine, tier)
    print(machine(tier))
    for batch in batches:
        off, on = (best[batch, guesses] for guesses in (False, True))
        said = [predicted_by(options, tier, batch, guesses) for guesses in (False, True)]
        print(
            f"{options.model} batch {batch}: {batch / off:.2f} -> {batch / on:.2f} tokens/s ({off * 1e3:.1f} -> {on * 1e3:.1f} ms; "
            f"predicted {said[0] * 1e3:.1f} -> {said[1] * 1e3:.1f} ms)"
        )
    engine.close()
    tier.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
