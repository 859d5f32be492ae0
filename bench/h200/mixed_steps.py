"""Steps of 65 to 2,048 rows on one GPU: decoding rows beside chunks of prompts. Kernel by kernel, and whole steps.

linear   qkv and out by the shape of a unit of work
experts  gate/up and down by the rows of an item
steps    whole steps (D sequences decoding over CACHED tokens, and a chunk of a new or a begun prompt), and where their time goes
Run: PYTHONPATH=src python bench/h200/mixed_steps.py linear experts steps
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from engine_speed import shape_of
from torch import Tensor

from windlass.core.scheme import scheme
from windlass.families import rules
from windlass.kernels.cuda import experts, int8, linear, route
from windlass.kernels.cuda.layout import dequantize
from windlass.kernels.step import BLOCK_TOKENS, Step
from windlass.nn.decoder import Decoder
from windlass.nn.fused.decoder import FusedDecoder
from windlass.nn.fused.feed_forward import RoutedFeed
from windlass.weights.load.random import RandomWeights

CACHED = 1150


def seconds(run: Callable[[], Any], rounds: int = 3) -> float:
    """The best of a few rounds, by the device's own clock."""
    run()
    times = []
    for _ in range(rounds):
        begun, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        run()
        done.record()
        done.synchronize()
        times.append(begun.elapsed_time(done) / 1e3)
    return min(times)


def compiled(tries: Sequence[Callable[[], Any]]) -> None:
    """All variants, several at a time."""

    def attempt(run: Callable[[], Any]) -> None:
        try:
            torch.zeros(1, device="cuda")  # a context for this thread
            run()
        except Exception as error:
            print("   failed:", str(error).splitlines()[0][:150], flush=True)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(attempt, tries))
    torch.cuda.synchronize()


# --- kernels alone ---------------------------------------------------------------------------------------------------


def measure_linear(fused: FusedDecoder, counts: Sequence[int]) -> None:
    """Over all layers, so that no weights are cached."""
    units = [(64, 1, 1), (64, 2, 1), (128, 1, 1), (128, 2, 1), (160, 2, 1), (256, 1, 1)]
    for name in ("qkv", "out"):
        matrices = [getattr(layer, name) for layer in fused.layers]
        first = matrices[0]
        for rows in counts:
            x = torch.randn(rows, first.width, device="cuda").bfloat16()
            out = torch.empty(rows, first.rows, dtype=torch.bfloat16, device="cuda")
            line = []
            for unit in units:

                def run(unit: tuple[int, int, int] = unit, matrices: Any = matrices, x: Tensor = x, out: Tensor = out) -> None:
                    for matrix in matrices:
                        linear.linear_wide(x, matrix, out, unit=unit)

                line.append(f"{unit[0]}x{unit[1]}: {seconds(run) / len(matrices) * 1e6:6.1f}")
            best = rows * first.rows * first.inputs * 2
            print(f"{name} {rows:5d} rows, us: {'  '.join(line)}   ({best / 1e9:.0f} GFLOP)", flush=True)


def measure_experts(fused: FusedDecoder, counts: Sequence[int]) -> None:
    feeds = [layer.feed for layer in fused.layers if isinstance(layer.feed, RoutedFeed)]
    feed = feeds[0]
    kinds = [("many", 8, 0), *(("wide", size, deep) for size in (16, 32, 64, 128, 160) for deep in (1, 2))]
    for rows in counts:
        scores = torch.rand(rows, feed.num_experts, device="cuda")
        ids = scores.topk(feed.num_active).indices.int()
        weights = torch.ones(rows, feed.num_active, device="cuda") / feed.num_active
        x = torch.randn(rows, feed.gate_up.inputs, device="cuda").bfloat16()
        act = torch.empty(rows * feed.slots, feed.width, dtype=torch.bfloat16, device="cuda")
        line = []
        for kind, size, deep in kinds:
            if (kind == "many" and rows > 320) or (kind == "wide" and rows * feed.num_active > 6 * size * feed.num_experts):
                continue
            routes = route.dispatch(ids, weights, feed.num_experts, feed.num_shared, size)
            parts = torch.empty(
                rows * feed.slots, x.shape[1], dtype=torch.float32 if kind == "many" else torch.bfloat16, device="cuda"
            )

            def up(kind: str = kind, routes: Any = routes, deep: int = deep) -> None:
                for f in feeds:
                    experts.gate_up_many(x, f.gate_up, act, routes) if kind == "many" else experts.gate_up_wide(
                        x, f.gate_up, act, routes, deep=deep
                    )

            def down(kind: str = kind, routes: Any = routes, deep: int = deep, parts: Tensor = parts) -> None:
                for f in feeds:
                    experts.down_many(act, f.down, parts, routes) if kind == "many" else experts.down_wide(
                        act, f.down, parts, routes, deep=deep
                    )

            try:
                found = [seconds(run) / len(feeds) * 1e6 for run in (up, down)]
            except Exception as error:
                line.append(f"{size}x{deep} failed {str(error)[:40]}")
                continue
            line.append(f"{size}x{deep} {found[0]:.0f}+{found[1]:.0f}")
        print(f"experts {rows:5d} rows, gate/up + down us: {'  '.join(line)}", flush=True)


def check_int8(fused: FusedDecoder) -> None:
    """Against products of the rounded rows in fp32, and against the rows as they were."""
    layer = fused.layers[-1]
    for rows in (33, 320):
        x = torch.randn(rows, layer.qkv.width, device="cuda").bfloat16()
        rounded = int8.quantize_rows(x)
        blocks = x.float().view(rows, -1, 128)
        step = blocks.abs().amax(-1, keepdim=True) / 127
        plain = ((blocks / step).round() * step).flatten(1)
        weight = dequantize(layer.qkv)[0]
        for size in int8.SHAPES:
            out = torch.empty(rows, layer.qkv.rows, dtype=torch.bfloat16, device="cuda")
            int8.linear(rounded, layer.qkv, out, rows=size)
            errors = [float((out.float() - y @ weight.T).norm() / (y @ weight.T).norm()) for y in (plain, x.float())]
            print(f"int8 linear {rows} rows by {size}: {errors[0]:.1e} from rounded rows, {errors[1]:.1e} from rows", flush=True)
        feed = layer.feed
        ids = torch.rand(rows, feed.num_experts, device="cuda").topk(feed.num_active).indices.int()
        weights = torch.ones(rows, feed.num_active, device="cuda")
        results = []
        for size in (0, *int8.SHAPES):
            routes = route.dispatch(ids, weights, feed.num_experts, feed.num_shared, size or 64)
            act = torch.zeros(rows * feed.slots, feed.width, dtype=torch.bfloat16, device="cuda")
            parts = torch.zeros(rows * feed.slots, x.shape[1], dtype=torch.bfloat16, device="cuda")
            if size:
                int8.gate_up(rounded, feed.gate_up, act, routes)
                int8.down(int8.quantize_rows(act), feed.down, parts, routes)
            else:
                experts.gate_up_wide(x, feed.gate_up, act, routes)
                experts.down_wide(act, feed.down, parts, routes)
            results.append((act.float(), parts.float()))
            errors = [float((a - b).norm() / b.norm()) for a, b in zip(results[-1], results[0], strict=True)]
            print(
                f"int8 experts {rows} rows by {size}: gate/up {errors[0]:.1e}, down {errors[1]:.1e} from bf16 products",
                flush=True,
            )


OTHER_SHAPES = {
    32: [int8.Shape(2, 2, 2, 2, 2), int8.Shape(3, 1, 2, 2, 1), int8.Shape(3, 2, 2, 2, 2)],
    64: [int8.Shape(3, 1, 2, 2, 2), int8.Shape(2, 2, 1, 2, 2)],
    96: [int8.Shape(3, 1, 1, 2, 2), int8.Shape(2, 2, 1, 2, 1)],
    128: [int8.Shape(2, 1, 1, 2, 2), int8.Shape(2, 2, 1, 2, 1)],
    160: [int8.Shape(2, 1, 2, 2, 1)],
}


def measure_int8(fused: FusedDecoder, counts: Sequence[int]) -> None:
    feeds = [layer.feed for layer in fused.layers if isinstance(layer.feed, RoutedFeed)]
    feed = feeds[0]
    kinds = [(size, shape) for size, first in int8.SHAPES.items() for shape in (first, *OTHER_SHAPES.get(size, ()))]
    small = int8.quantize_rows(torch.zeros(8, fused.layers[0].qkv.width, device="cuda").bfloat16())
    out = torch.empty(8, fused.layers[0].qkv.rows, dtype=torch.bfloat16, device="cuda")
    compiled([lambda n=n, h=h: int8.linear(small, fused.layers[0].qkv, out, rows=n, shape=h) for n, h in kinds])
    compiled([
        lambda n=n, h=h, k=k, w=w: int8.kernel(k, w, n, w.tile_blocks, items=1, shape=h)
        for n, h in kinds for k, w in ((1, feed.gate_up), (3, feed.down))
    ])  # fmt: skip
    for rows in counts:
        for name in ("qkv", "out"):
            matrices = [getattr(layer, name) for layer in fused.layers]
            first = matrices[0]
            x = torch.randn(rows, first.width, device="cuda").bfloat16()
            rounded = int8.quantize_rows(x)
            line = [f"rounding {seconds(lambda x=x: [int8.quantize_rows(x) for _ in range(8)]) / 8 * 1e6:.1f}"]
            for size, shape in kinds:
                if size > rows + 32:
                    continue
                groups = -(-first.num_tiles // shape.tiles) * -(-rows // size)
                slices = max((s for s in (1, 2, 3, 4, 6, 8) if first.tile_blocks % s == 0 and groups * s <= 140), default=1)
                dtype, lead = (torch.bfloat16, ()) if slices == 1 else (torch.float32, (slices,))
                out = torch.empty(*lead, rows, first.rows, dtype=dtype, device="cuda")

                def run(
                    size: int = size,
                    shape: Any = shape,
                    out: Tensor = out,
                    slices: int = slices,
                    matrices: Any = matrices,
                    rounded: Any = rounded,
                ) -> None:
                    for matrix in matrices:
                        int8.linear(rounded, matrix, out, rows=size, shape=shape, slices=slices)

                line.append(
                    f"{size}:{shape.warpgroups}{shape.deep}{shape.sets}{shape.fragments}{shape.stage_blocks}/{slices} {seconds(run) / len(matrices) * 1e6:.0f}"
                )
            print(f"int8 {name} {rows:5d}: {'  '.join(line)}", flush=True)
        ids = torch.rand(rows, feed.num_experts, device="cuda").topk(feed.num_active).indices.int()
        weights = torch.ones(rows, feed.num_active, device="cuda") / feed.num_active
        x = int8.quantize_rows(torch.randn(rows, feed.gate_up.inputs, device="cuda").bfloat16())
        act = torch.randn(rows * feed.slots, feed.width, device="cuda").bfloat16()
        hidden = int8.quantize_rows(act)
        parts = torch.empty(rows * feed.slots, feed.down.rows, dtype=torch.bfloat16, device="cuda")
        mean = rows * feed.num_active / feed.num_experts
        line = [f"rounding {seconds(lambda act=act: [int8.quantize_rows(act) for _ in range(8)]) / 8 * 1e6:.1f}"]
        for size, shape in kinds:
            if not mean * 0.4 <= size <= max(48, 3 * mean):
                continue
            routes = route.dispatch(ids, weights, feed.num_experts, feed.num_shared, size)
            up = seconds(
                lambda routes=routes, shape=shape, x=x, act=act: [
                    int8.gate_up(x, f.gate_up, act, routes, shape=shape) for f in feeds
                ]
            )
            down = seconds(
                lambda routes=routes, shape=shape, h=hidden, p=parts: [
                    int8.down(h, f.down, p, routes, shape=shape) for f in feeds
                ]
            )
            line.append(
                f"{size}:{shape.warpgroups}{shape.deep}{shape.sets}{shape.fragments}{shape.stage_blocks} "
                f"{up / len(feeds) * 1e6:.0f}+{down / len(feeds) * 1e6:.0f}"
            )
        print(f"int8 experts {rows:5d}: {'  '.join(line)}", flush=True)


# --- whole steps -----------------------------------------------------------------------------------------------------


def mixed_step(decoding: int, chunk: int, begun: int, vocab: int, prompts: int = 1) -> tuple[Step, int]:
    """`decoding` sequences of CACHED tokens, then prompts of `chunk` tokens after `begun` cached ones. And how many pages it needs."""
    pages = -(-max(CACHED, begun + chunk) // BLOCK_TOKENS) + 1
    spans = [(CACHED - 1, CACHED)] * decoding + [(begun, begun + chunk)] * (prompts if chunk else 0)
    positions = torch.cat([torch.arange(a, b, dtype=torch.int32) for a, b in spans])
    widths = torch.tensor([b - a for a, b in spans], dtype=torch.int32)
    starts = torch.nn.functional.pad(widths.cumsum(0), (1, 0)).int()
    lengths = torch.tensor([b for _, b in spans], dtype=torch.int32)
    numbers = torch.arange(len(spans), dtype=torch.int32)
    blocks = numbers[:, None] * pages + torch.arange(pages, dtype=torch.int32)
    slots = numbers.repeat_interleave(widths) * pages * BLOCK_TOKENS + positions
    tokens = torch.randint(0, vocab, (len(positions),), dtype=torch.int32)
    logit_rows = starts[1:] - 1
    counts = torch.tensor([len(tokens), len(spans), len(spans)], dtype=torch.int32)
    on_device = (tokens, positions, slots, starts, lengths, blocks, logit_rows)
    return Step(*(x.cuda() for x in on_device), counts, host_starts=starts, host_lengths=lengths), len(spans) * pages


def measure_steps(decoder: Decoder, cases: Sequence[tuple[int, int, int, int]], whole_layers: int, top: int) -> None:
    layers = len(decoder.layers)
    for decoding, chunk, begun, prompts in cases:
        step, pages = mixed_step(decoding, chunk, begun, decoder.spec.vocab_size, prompts)
        caches = decoder.make_caches(pages + 1, device="cuda")
        with torch.inference_mode():
            took = seconds(lambda step=step, caches=caches: decoder(step, caches))
            torch.cuda.synchronize()
            begun_at = time.perf_counter()
            decoder(step, caches)
            host = time.perf_counter() - begun_at
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                decoder(step, caches)
                torch.cuda.synchronize()
        rows = decoding + chunk * prompts
        whole = took / layers * whole_layers
        print(
            f"step: {decoding} decoding + {prompts} x {chunk} after {begun}: {took / layers * 1e6:7.1f} us a layer, about {whole * 1e3:6.1f} ms a step, "
            f"{rows / whole:7.0f} rows/s, host {host / layers * 1e6:.0f} us a layer",
            flush=True,
        )
        for row in sorted(profile.key_averages(), key=lambda r: -r.device_time_total)[:top]:
            print(
                f"      {row.key[:60]:60s} {row.count:5d} x {row.device_time_total / max(row.count, 1):8.1f} us, {row.device_time_total / layers:8.1f} a layer"
            )
        del caches
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", choices=("linear", "experts", "int8", "steps"))
    parser.add_argument("--model", default="GLM-4.5-Air")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", default="72,96,128,192,256,320,384,512,768,1024,2048")
    parser.add_argument(
        "--cases",
        default="64+0+0,0+128+0,0+512+0,0+1024+0,0+2048+0,64+192+0,64+448+0,64+448+512,64+960+0,128+0+0,256+0+0,8+1024+0",
    )
    parser.add_argument("--top", type=int, default=12)
    options = parser.parse_args()
    counts = [int(rows) for rows in options.rows.split(",")]
    _, full = shape_of(options.model)
    _, spec = shape_of(options.model, options.layers)
    decoder = Decoder(spec, RandomWeights(spec, rules(spec), quant=scheme("int4", 128), device="cuda", tiled=True), 8192)
    fused = decoder.fused
    assert isinstance(fused, FusedDecoder)
    print(torch.cuda.get_device_name(), options.model, options.layers, "layers", flush=True)
    if "linear" in options.what:
        x = torch.zeros(256, fused.layers[0].qkv.width, device="cuda").bfloat16()
        out = torch.empty(256, fused.layers[0].qkv.rows, dtype=torch.bfloat16, device="cuda")
        units = [(64, 1, 1), (64, 2, 1), (128, 1, 1), (128, 2, 1), (160, 2, 1), (256, 1, 1)]
        compiled([lambda u=u: linear.linear_wide(x, fused.layers[0].qkv, out, unit=u) for u in units])
        measure_linear(fused, counts)
    if "experts" in options.what:
        weight = {1: fused.layers[-1].feed.gate_up, 3: fused.layers[-1].feed.down}
        compiled([
            lambda k=k, n=n, d=d: linear.wide_kernel(k, weight[k], n, weight[k].tile_blocks, items=1, deep=d)
            for k in (1, 3) for n in (16, 32, 64, 128, 160) for d in (1, 2)
        ])  # fmt: skip
        measure_experts(fused, counts)
    if "int8" in options.what:
        check_int8(fused)
        measure_int8(fused, counts)
    if "steps" in options.what:
        cases = [tuple(int(n) for n in case.split("+")) for case in options.cases.split(",")]
        measure_steps(decoder, [(*case[:3], case[3] if len(case) > 3 else 1) for case in cases], full.num_layers, options.top)
    return 0


if __name__ == "__main__":
    sys.exit(main())
