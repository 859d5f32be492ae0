"""The engine on one GPU: is it right at full width, and how fast is it. Everything goes through Engine (scheduler, paged cache, sampler) but `check`.

check    four full-width layers against float64: prefill and decode, batch 1 and batched, graph and eager bit for bit
table    tokens/s of decode and prefill at the published shapes, beside what the memory allows
kernels  where a step's time goes, kernel by kernel
long     decode steps over long caches of random numbers
Run: PYTHONPATH=src python bench/h200/engine_speed.py check table kernels long
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from windlass.core.launch import Launch, RandomInit
from windlass.core.model import ModelSpec
from windlass.core.scheme import scheme
from windlass.model.families import describe, rules
from windlass.model.families.registry import find, published_config
from windlass.runtime.kernels.cuda import linear
from windlass.runtime.kernels.cuda.layout import Tiles, dequantize
from windlass.runtime.kernels.step import BLOCK_TOKENS, KvCache, Step
from windlass.runtime.nn.decoder import Decoder
from windlass.runtime.nn.fused import decoder as fused
from windlass.runtime.nn.fused import feed_forward as fused_ffn
from windlass.runtime.weights.load.random import RandomWeights
from windlass.tasks.bench.bench import NoProgress, bench
from windlass.tasks.bench.memory import MemoryLog
from windlass.tasks.bench.setup import BenchSetup


def shape_of(name: str, layers: int | None = None) -> tuple[dict[str, Any], ModelSpec]:
    """The published config, perhaps less deep."""
    known = find(name)
    assert known is not None, name
    config = {key: value for key, value in published_config(known).items() if key != "quantization_config"}
    if layers is not None:
        config["num_hidden_layers"] = layers
        if "num_nextn_predict_layers" in config:
            config["num_nextn_predict_layers"] = 0
    return config, describe(config, name)


# --- check -----------------------------------------------------------------------------------------------------------


class Widened:
    """The same weights as plain float64 numbers."""

    dtype = torch.float64

    def __init__(self, weights: RandomWeights) -> None:
        self._weights, self.device = weights, weights.device

    def matrix(self, *names: str) -> Tensor:
        return _wide(self._weights.matrix(*names))

    def dense_matrix(self, *names: str) -> Tensor:
        return self._weights.dense_matrix(*names).double()

    def vector(self, *names: str) -> Tensor | None:
        found = self._weights.vector(*names)
        return None if found is None else found.double()

    def experts(self, layer: int, *parts: str) -> Tensor:
        found = self._weights.experts(layer, *parts)
        assert isinstance(found, Tiles)
        return torch.cat([dequantize(found.part(i, i + 1), torch.float64) for i in range(found.num_matrices)])

    def expert_vectors(self, layer: int, *parts: str) -> Tensor | None:
        return self._weights.expert_vectors(layer, *parts)


def _wide(found: Any) -> Tensor:
    return dequantize(found, torch.float64)[0] if isinstance(found, Tiles) else found.double()


def make_step(tokens: Tensor, first: int, last: int, pages: int) -> Step:
    """Tokens first..last of every sequence of `tokens` [sequences, tokens]; sequence s has pages s * pages ..."""
    count, width = tokens.shape[0], last - first
    numbers = torch.arange(count, dtype=torch.int32)
    positions = torch.arange(first, last, dtype=torch.int32).repeat(count)
    starts = torch.arange(count + 1, dtype=torch.int32) * width
    lengths = torch.full((count,), last, dtype=torch.int32)
    blocks = numbers[:, None] * pages + torch.arange(pages, dtype=torch.int32)
    slots = numbers.repeat_interleave(width) * pages * BLOCK_TOKENS + positions
    rows = count * width
    on_device = (
        tokens[:, first:last].reshape(-1),
        positions,
        slots,
        starts,
        lengths,
        blocks,
        torch.arange(rows, dtype=torch.int32),
    )
    counts = torch.tensor([rows, count, rows], dtype=torch.int32)
    return Step(*(x.cuda() for x in on_device), counts, host_starts=starts, host_lengths=lengths)


def worst(found: Tensor, expected: Tensor) -> str:
    """Error of each row in norm; rows whose experts were chosen otherwise at a near tie stand out."""
    errors = (found.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    same = (found.argmax(-1) == expected.argmax(-1)).double().mean()
    return f"rows {len(errors):4d}, relative error median {errors.median():.1e}, worst {errors.max():.1e}, same first token {same:.0%}"


def check(name: str, layers: int, num_tokens: int = 48) -> None:
    _, spec = shape_of(name, layers)
    weights = RandomWeights(spec, rules(spec), quant=scheme("int4", 128), device="cuda", tiled=True)
    assert weights.tiled, "these weights cannot be tiled"
    decoder = Decoder(spec, weights, 4096)
    tokens = torch.randint(0, spec.vocab_size, (64, num_tokens), dtype=torch.int32)
    pages = -(-num_tokens // BLOCK_TOKENS)
    with torch.inference_mode():
        exact = Decoder(spec, Widened(weights), 4096)  # type: ignore[arg-type]
        expected = torch.cat([exact(make_step(part, 0, num_tokens, pages)) for part in tokens.split(8)])
        del exact
        torch.cuda.empty_cache()
        expected = expected.view(64, num_tokens, -1)
        for count in (1, 2, 8, 20, 64):
            caches = decoder.make_caches(count * pages, device="cuda")
            some = tokens[:count]
            told = f"{name}, {layers} layers, {count:2d} sequences"
            read = decoder(make_step(some, 0, num_tokens - 1, pages), caches)
            print(f"{told}, prompts   {worst(read, expected[:count, :-1].flatten(0, 1))}", flush=True)
            step = make_step(some, num_tokens - 1, num_tokens, pages)
            last = decoder(step, caches)
            print(f"{told}, next token {worst(last, expected[:count, -1])}", flush=True)
            if count > 1:
                alone = [decoder(_alone(step, i), caches) for i in range(min(count, 8))]
                print(f"{told}, alone     {worst(torch.cat(alone), last[:8].double())} (against batched)", flush=True)
            print(f"{told}, graph equals eager: {_graphed(decoder, step, caches, last)}", flush=True)


def _alone(step: Step, row: int) -> Step:
    part = slice(row, row + 1)
    assert step.host_lengths is not None
    return replace(
        step, tokens=step.tokens[part], positions=step.positions[part], slots=step.slots[part], starts=step.starts[:2],
        lengths=step.lengths[part], blocks=step.blocks[part], logit_rows=step.logit_rows[:1],
        counts=torch.ones(3, dtype=torch.int32), host_starts=torch.tensor([0, 1]), host_lengths=step.host_lengths[part],
    )  # fmt: skip


def _graphed(decoder: Decoder, step: Step, caches: Sequence[KvCache], eager: Tensor) -> list[bool]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decoder(step, caches)
    results = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        results.append(torch.equal(out, eager))
    return results


# --- table -----------------------------------------------------------------------------------------------------------


def table(name: str, batches: Sequence[int], *, layers: int | None = None, prompt: int = 128, new: int = 64) -> None:
    config, spec = shape_of(name, layers)
    random = RandomInit(config=config, scheme="int4", group=128)
    launch = Launch(model=name, device="cuda", random_weights=random)
    setup = BenchSetup(
        name=name, spec=spec, rules=rules(spec), launch=launch, scheme=scheme("int4", 128), batches=tuple(batches), prompt_tokens=prompt,
        new_tokens=new,
    )  # fmt: skip
    began = time.perf_counter()
    report = bench(setup, began, MemoryLog(), None, None, NoProgress())
    limit = report.limits.read_bytes_per_second
    held = report.memory
    print(
        f"{name} {layers or spec.num_layers} layers, {report.scheme}: ready after {report.start_seconds:.1f} s, weights "
        f"{held.weights.total / 2**30:.1f} GiB, all {held.resident_bytes / 2**30:.1f} GiB; {limit / 1e12:.2f} TB/s, "
        f"{report.limits.matmul_flops / 1e12:.0f} TFLOP/s measured",
        flush=True,
    )
    for run in report.runs:
        read = run.step_read_bytes
        print(
            f"  batch {run.batch:3d}: decode {run.decode_tokens_per_second:8.1f} tok/s (mean {run.mean_decode_tokens_per_second:.1f}), "
            f"{run.step_seconds * 1e3:7.3f} ms, {read / 1e9:6.2f} GB, {read / run.step_seconds / 1e12:.2f} TB/s, "
            f"{read / run.step_seconds / limit:.0%} | prefill {run.prefill_tokens_per_second:7.0f} tok/s "
            f"({run.batch} x {run.prompt_tokens}), experts touched {run.experts_touched}",
            flush=True,
        )


# --- kernels ---------------------------------------------------------------------------------------------------------


def kernels(name: str, batches: Sequence[int], layers: int, tokens: int = 200) -> None:
    """Microseconds by kernel, of a step with caches that are random."""
    _, spec = shape_of(name, layers)
    decoder = Decoder(spec, RandomWeights(spec, rules(spec), quant=scheme("int4", 128), device="cuda", tiled=True), 4096)
    for batch in batches:
        pages = -(-tokens // BLOCK_TOKENS)
        some = torch.randint(0, spec.vocab_size, (batch, tokens), dtype=torch.int32)
        caches = decoder.make_caches(batch * pages, device="cuda")
        step = make_step(some, tokens - 1, tokens, pages)
        with torch.inference_mode():
            decoder(step, caches)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                decoder(step, caches)
            graph.replay()
            torch.cuda.synchronize()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                graph.replay()
                torch.cuda.synchronize()
        print(f"batch {batch}, {layers} layers")
        for row in sorted(profile.key_averages(), key=lambda r: -r.device_time_total)[:14]:
            print(f"   {row.key[:70]:70s} {row.count:5d} x {row.device_time_total / row.count:8.1f} us")


# --- long ------------------------------------------------------------------------------------------------------------


def long(name: str, cases: Sequence[tuple[int, int]], layers: int | None) -> None:
    """Whole decode steps as graphs; reading so many tokens first would take minutes."""
    _, spec = shape_of(name, layers)
    decoder = Decoder(
        spec, RandomWeights(spec, rules(spec), quant=scheme("int4", 128), device="cuda", tiled=True), max(n for _, n in cases)
    )
    for batch, tokens in cases:
        pages = -(-tokens // BLOCK_TOKENS)
        caches = decoder.make_caches(batch * pages, device="cuda")
        for cache in caches:
            cache.keys.normal_()
            cache.values.normal_()  # type: ignore[union-attr]
        step = make_step(
            torch.randint(0, spec.vocab_size, (batch, 1), dtype=torch.int32).expand(batch, tokens), tokens - 1, tokens, pages
        )
        with torch.inference_mode():
            decoder(step, caches)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                decoder(step, caches)
        times = []
        for _ in range(5):
            torch.cuda.synchronize()
            began = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        read = sum(cache.keys.numel() * 4 for cache in caches)
        seconds = min(times)
        print(
            f"{name} {batch} x {tokens:6d} tokens: {seconds * 1e3:7.2f} ms a step, {batch / seconds:6.1f} tok/s, {read / 1e9:5.1f} GB of cache",
            flush=True,
        )
        del caches, graph
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", nargs="+", choices=("check", "table", "kernels", "long"))
    parser.add_argument("--model", default="GLM-4.5-Air")
    parser.add_argument("--batch", default="1,8,32,64")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--product", type=int, help="runtime/kernels/cuda/linear.py's PRODUCT")
    parser.add_argument("--no-pairs", action="store_true", help="without runtime/kernels/cuda/linear.py's PAIRS")
    parser.add_argument("--dependent", type=int, help="runtime/nn/fused/decoder.py's DEPENDENT_ROWS")
    parser.add_argument("--item", type=int, help="runtime/nn/fused/feed_forward.py's ITEM_ROWS")
    options = parser.parse_args()
    batches = [int(b) for b in options.batch.split(",")]
    if options.product is not None:
        linear.PRODUCT = options.product
    linear.PAIRS = not options.no_pairs
    if options.item is not None:
        fused_ffn.ITEM_ROWS = options.item
    if options.dependent is not None:
        fused.DEPENDENT_ROWS = options.dependent
    print(torch.cuda.get_device_name(), torch.__version__, torch.version.cuda, flush=True)
    if "check" in options.what:
        check(options.model, options.layers or 4)
    if "table" in options.what:
        table(options.model, batches, layers=options.layers, prompt=options.prompt, new=options.new)
    if "kernels" in options.what:
        kernels(options.model, batches, options.layers or 8)
    if "long" in options.what:
        long(options.model, ((1, 200), (1, 32768), (8, 32768), (1, 131072), (3, 131072)), options.layers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
