"""Steps of 65 rows and more on one GPU: decoding sequences beside chunks of prompts.

int8   products of rows rounded to 8 bits: their error, and their time by the rows of a unit
steps  whole steps (D sequences decoding over CACHED tokens, and chunks of new or begun prompts), and where their time goes
Run: PYTHONPATH=src:bench/h200 python bench/h200/mixed_steps.py int8 steps
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from engine_speed import shape_of
from torch import Tensor

from windlass.core import integer_units
from windlass.core.scheme import scheme
from windlass.model.families import rules
from windlass.runtime.kernels.cuda import driver, int8, linear, route
from windlass.runtime.kernels.cuda.layout import Tiles, dequantize
from windlass.runtime.kernels.step import BLOCK_TOKENS, Step
from windlass.runtime.nn.decoder import Decoder
from windlass.runtime.nn.fused.decoder import FusedDecoder
from windlass.runtime.nn.fused.feed_forward import RoutedFeed
from windlass.runtime.weights.load.random import RandomWeights

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


def halves(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="cuda")


# --- int8 ------------------------------------------------------------------------------------------------------------


def errors(weight: Tiles, rows: int = 320) -> None:
    """Of a product of random rows, against fp32: in integers, and in bf16."""
    x = torch.randn(rows, weight.width, device="cuda").bfloat16()
    exact = x.float() @ dequantize(weight)[0].T
    found = {
        "int8": int8.linear(int8.quantize_rows(x), weight, halves(rows, weight.rows)),
        "bf16": linear.linear_wide(x, weight, halves(rows, weight.rows)),
    }
    for name, out in found.items():
        print(
            f"error of {name} products, {weight.rows} x {weight.inputs}: {float((out.float() - exact).norm() / exact.norm()):.1e}"
        )


def measure_products(fused: FusedDecoder, rows: int) -> None:
    """Over all layers, so that no weights are in the cache."""
    for name in ("qkv", "out"):
        matrices = [getattr(layer, name) for layer in fused.layers]
        x, out = (
            int8.quantize_rows(torch.randn(rows, matrices[0].width, device="cuda").bfloat16()),
            halves(rows, matrices[0].rows),
        )

        def product(
            kind: integer_units.UnitKind, matrices: list[Tiles] = matrices, x: int8.RoundedRows = x, out: Tensor = out
        ) -> float:
            run = functools.partial(int8.linear, x, out=out, way=integer_units.Cut(kind.rows, kind.shape, 1, 0.0))
            return seconds(lambda: [run(weight=matrix) for matrix in matrices]) / len(matrices)

        times = (f"{kind.rows}: {product(kind) * 1e6:.0f}" for kind in integer_units.UNIT_KINDS)
        print(f"{name:8s} {rows:5d} rows, us: {'  '.join(times)}", flush=True)


def measure_experts(feeds: list[RoutedFeed], rows: int) -> None:
    """Even routing."""
    feed = feeds[0]
    ids = torch.rand(rows, feed.num_experts, device="cuda").topk(feed.num_active).indices.int()
    weights = torch.full((rows, feed.num_active), 1 / feed.num_active, device="cuda")
    x = int8.quantize_rows(torch.randn(rows, feed.gate_up.inputs, device="cuda").bfloat16())
    act, parts = torch.randn(rows * feed.slots, feed.width, device="cuda").bfloat16(), halves(rows * feed.slots, feed.down.rows)
    hidden = int8.quantize_rows(act)
    line = []
    for size in integer_units.SHAPES:
        routes = route.dispatch(ids, weights, feed.num_experts, feed.num_shared, size)
        up = seconds(lambda routes=routes: [int8.gate_up(x, f.gate_up, act, routes) for f in feeds]) / len(feeds)
        down = seconds(lambda routes=routes: [int8.down(hidden, f.down, parts, routes) for f in feeds]) / len(feeds)
        line.append(f"{size}: {up * 1e6:.0f} + {down * 1e6:.0f}")
    print(f"experts  {rows:5d} rows, us: {'  '.join(line)}", flush=True)


def measure_all(fused: FusedDecoder, counts: list[int]) -> None:
    feeds = [layer.feed for layer in fused.layers if isinstance(layer.feed, RoutedFeed)]
    for rows in counts:
        measure_products(fused, rows)
        if feeds:
            measure_experts(feeds, rows)


# --- whole steps -----------------------------------------------------------------------------------------------------


def mixed_step(decoding: int, chunk: int, begun: int, vocab: int) -> tuple[Step, int]:
    """`decoding` sequences of CACHED tokens, then a prompt's `chunk` tokens after `begun` cached ones. And how many pages it needs."""
    pages = -(-max(CACHED, begun + chunk) // BLOCK_TOKENS) + 1
    spans = [(CACHED - 1, CACHED)] * decoding + [(begun, begun + chunk)] * (chunk > 0)
    positions = torch.cat([torch.arange(a, b, dtype=torch.int32) for a, b in spans])
    widths = torch.tensor([b - a for a, b in spans], dtype=torch.int32)
    starts = torch.nn.functional.pad(widths.cumsum(0), (1, 0)).int()
    lengths = torch.tensor([b for _, b in spans], dtype=torch.int32)
    numbers = torch.arange(len(spans), dtype=torch.int32)
    blocks = numbers[:, None] * pages + torch.arange(pages, dtype=torch.int32)
    slots = numbers.repeat_interleave(widths) * pages * BLOCK_TOKENS + positions
    tokens = torch.randint(0, vocab, (len(positions),), dtype=torch.int32)
    counts = torch.tensor([len(tokens), len(spans), len(spans)], dtype=torch.int32)
    on_device = (tokens, positions, slots, starts, lengths, blocks, starts[1:] - 1)
    return Step(*(x.cuda() for x in on_device), counts, host_starts=starts, host_lengths=lengths), len(spans) * pages


def measure_step(decoder: Decoder, case: tuple[int, int, int], whole_layers: int, top: int) -> None:
    decoding, chunk, begun = case
    layers = len(decoder.layers)
    step, pages = mixed_step(decoding, chunk, begun, decoder.spec.vocab_size)
    caches = decoder.make_caches(pages + 1, device="cuda")
    with torch.inference_mode():
        took = seconds(lambda: decoder(step, caches))
        torch.cuda.synchronize()
        started = time.perf_counter()
        decoder(step, caches)
        host = time.perf_counter() - started
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            decoder(step, caches)
            torch.cuda.synchronize()
    whole, each = took / layers * whole_layers, 1e6 / layers
    print(
        f"{decoding} decoding + {chunk} after {begun}: {took * each:7.1f} us a layer ({host * each:.0f} on the host), "
        f"about {whole * 1e3:6.1f} ms a step, {(decoding + chunk) / whole:7.0f} rows/s",
        flush=True,
    )
    for row in sorted(profile.key_averages(), key=lambda r: -r.device_time_total)[:top]:
        print(f"      {row.key[:60]:60s} {row.count:5d} x {row.device_time_total / max(row.count, 1):8.1f} us")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", choices=("int8", "steps"))
    parser.add_argument("--model", default="GLM-4.5-Air")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", default="128,256,320,512,768,1024,2048")
    parser.add_argument(
        "--cases", default="64+0+0,0+128+0,0+1024+0,0+2048+0,64+256+0,64+256+512,64+960+0,128+0+0,256+0+0,256+1024+0"
    )
    parser.add_argument("--top", type=int, default=12)
    options = parser.parse_args()
    _, full = shape_of(options.model)
    _, spec = shape_of(options.model, options.layers)
    decoder = Decoder(spec, RandomWeights(spec, rules(spec), quant=scheme("int4", 128), device="cuda", tiled=True), 8192)
    fused = decoder.fused
    assert isinstance(fused, FusedDecoder)
    print(torch.cuda.get_device_name(), options.model, options.layers, "layers", flush=True)
    if "int8" in options.what:
        errors(fused.layers[-1].qkv)
        # Kernels are compiled together first: one after another they would take a minute.
        with driver.collecting() as units, contextlib.redirect_stdout(io.StringIO()):
            measure_all(fused, [int(options.rows.split(",")[0])])
        driver.compile_all(units)
        measure_all(fused, list(map(int, options.rows.split(","))))
    if "steps" in options.what:
        cases: Sequence[tuple[int, ...]] = [tuple(map(int, case.split("+"))) for case in options.cases.split(",")]
        for decoding, chunk, begun in cases:
            measure_step(decoder, (decoding, chunk, begun), full.num_layers, options.top)
    return 0


if __name__ == "__main__":
    sys.exit(main())
