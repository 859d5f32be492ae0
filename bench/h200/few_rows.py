"""Kernels of one to four rows at the shapes of a model, each by itself: microseconds of a launch in a graph of all layers, weights never in cache.

Rows are consecutive tokens of one sequence, as in a step that verifies drafts. Random weights; `distinct` is the experts that rows chose, of a layer.
Run: PYTHONPATH=src python bench/h200/few_rows.py
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import torch
from engine_speed import shape_of
from torch import Tensor

from windlass.core.launch import Launch, RandomInit
from windlass.runtime.engine.load import build
from windlass.runtime.kernels.cuda import driver, experts, linear, route
from windlass.runtime.kernels.step import BLOCK_TOKENS, KvCache, Step
from windlass.runtime.nn.fused.decoder import FusedDecoder
from windlass.runtime.nn.fused.feed_forward import RoutedFeed
from windlass.runtime.nn.fused.layer import FusedLayer

Launched = Callable[[FusedLayer, KvCache], object]


def chained(rows: int, cached: int) -> Step:
    """So many new tokens of a sequence, each as one of its own."""
    pages = -(-(cached + rows) // BLOCK_TOKENS)
    positions = torch.arange(cached, cached + rows, dtype=torch.int32)
    starts = torch.arange(rows + 1, dtype=torch.int32)
    blocks = torch.arange(pages, dtype=torch.int32).repeat(rows, 1)
    slots, lengths, counts = positions.clone(), positions + 1, torch.full((3,), rows, dtype=torch.int32)
    on_device = (part.cuda() for part in (positions, positions, slots, starts, lengths, blocks, starts[:rows]))
    return Step(*on_device, counts, starts, lengths, is_chained=rows > 1)


def microseconds(layers: Sequence[FusedLayer], caches: Sequence[KvCache], launch: Launched, repeats: int = 20) -> float:
    """Of one launch."""

    def everything() -> None:
        for layer, cache in zip(layers, caches, strict=True):
            launch(layer, cache)

    everything()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        everything()
    graph.replay()
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    for _ in range(repeats):
        graph.replay()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) * 1e3 / repeats / len(layers)


def kernels_of(fused: FusedDecoder, rows: int, step: Step) -> dict[str, Launched]:
    layer = fused.layers[-1]
    assert isinstance(layer.feed, RoutedFeed)
    h = torch.randn(rows, layer.qkv.inputs, device="cuda")
    space = fused.space(step)
    qkv = torch.randn(rows, layer.qkv.rows, device="cuda").to(torch.bfloat16)
    attended = torch.randn(rows, layer.out.inputs, device="cuda").to(torch.bfloat16)
    logits = torch.randn(rows, layer.feed.num_experts, device="cuda")
    act = torch.randn(rows, layer.feed.slots * layer.feed.width, device="cuda").to(torch.bfloat16)
    out = torch.empty_like(h)

    def feed(one: FusedLayer) -> RoutedFeed:
        assert isinstance(one.feed, RoutedFeed)
        return one.feed

    def gate_up(one: FusedLayer, _: KvCache) -> Tensor:
        its = feed(one)
        return experts.gate_up_few(
            h, one.ffn_norm, its.gate_up, act, logits, its.correction, its.routes, eps=fused.eps, routed_scale=its.scale
        )

    return {
        "qkv": lambda one, _: linear.linear_few(h, one.qkv, qkv, bias=one.mixer.qkv.bias, norm=one.norm, eps=fused.eps),
        "attention": lambda one, cache: one._attended(qkv, cache, space),
        "out": lambda one, _: linear.linear_few(attended, one.out, out, residual=h),
        "router": lambda one, _: route.router_few(h, one.ffn_norm, feed(one).router, logits, fused.eps),
        "gate/up": gate_up,
        "down": lambda one, _: experts.down_few(act, feed(one).down, out, feed(one).routes, residual=h),
        "whole layer": lambda one, cache: one.few(h, cache, space),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="GLM-4.5-Air")
    parser.add_argument("--layers", type=int, default=11)
    parser.add_argument("--cached", type=int, default=1024)
    options = parser.parse_args()
    config, _ = shape_of(options.model, options.layers)
    began = time.perf_counter()
    launch = Launch(model=options.model, device="cuda", random_weights=RandomInit(config=config, scheme="int4", group=128))
    decoder = build(launch, "cuda").decoder
    fused = decoder.fused
    assert isinstance(fused, FusedDecoder)
    caches = decoder.make_caches(options.cached // BLOCK_TOKENS + 2, torch.bfloat16, "cuda")
    routed = [(layer, cache) for layer, cache in zip(fused.layers, caches, strict=True) if isinstance(layer.feed, RoutedFeed)]
    layers, of = [layer for layer, _ in routed], [cache for _, cache in routed]
    print(f"{torch.cuda.get_device_name()}: weights after {time.perf_counter() - began:.1f} s", flush=True)
    table: dict[str, list[float]] = {}
    distinct: list[float] = []
    with torch.inference_mode(), driver.dependent_launches(True):
        counts = range(1, fused._most_few + 1)
        kernels = {rows: kernels_of(fused, rows, chained(rows, options.cached)) for rows in counts}
        with driver.collecting() as units:
            for launched in (one for some in kernels.values() for one in some.values()):
                launched(layers[0], of[0])
        driver.compile_all(units)
        for rows in counts:
            for name, launched in kernels[rows].items():
                table.setdefault(name, []).append(microseconds(layers, of, launched))
            distinct.append(sum(layer.feed.routes.ids[:rows].unique().numel() for layer in layers) / len(layers))  # type: ignore[union-attr]
    print(f"\n  {'us by rows':12s}" + "".join(f"{rows:9d}" for rows in range(1, len(distinct) + 1)))
    for name, found in table.items():
        print(f"  {name:12s}" + "".join(f"{one:9.2f}" for one in found))
    print(f"  {'distinct':12s}" + "".join(f"{one:9.1f}" for one in distinct))
    return 0


if __name__ == "__main__":
    sys.exit(main())
