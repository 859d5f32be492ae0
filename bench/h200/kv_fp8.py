"""A KV cache in fp8 beside one in bf16, on one GPU: decode steps over long caches, what they read, how their logits differ, what fits.

Weights are random, of a published shape in int4. Caches hold the keys and values of one true prompt of 2,048 tokens again and again: reading 128k
tokens first would take a minute each. Steps are CUDA graphs, as the Engine captures them. `error` compares log-probabilities of tokens
after the true prompt alone; beside them those of bf16 caches whose prompt was read in two steps, which is what kernels differ by anyway.
Run: PYTHONPATH=src:bench/h200 python bench/h200/kv_fp8.py (about a minute)
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import torch
from engine_speed import make_step, shape_of
from torch import Tensor

from windlass.core.scheme import kv_token_bytes, scheme
from windlass.model.families import rules
from windlass.runtime.engine.load import KV_DTYPES
from windlass.runtime.engine.memory import defaults_of, spare_bytes
from windlass.runtime.kernels.cuda import attention
from windlass.runtime.kernels.step import BLOCK_TOKENS, KvCache, Step
from windlass.runtime.nn.decoder import Decoder
from windlass.runtime.nn.fused.decoder import FusedDecoder
from windlass.runtime.weights.load.random import RandomWeights
from windlass.tasks.bench.limits import device_read_speed

PROMPT, AFTER = 2048, 32
CASES = ((1, PROMPT), (1, 32768), (8, 32768), (1, 131072), (3, 131072), (6, 131072), (8, 131072))
KV = ("bf16", "fp8")
SHAPES = ((4, 2), (8, 1), (8, 2), (8, 3), (12, 1), (12, 2), (16, 1))
"""Warps, and pages of 16 tokens in bf16 that each has in flight; fp8 has twice as many."""
SPARE_BYTES = 3 * 10**9
"""Left for activations."""


def caches_of(decoder: Decoder, tokens: int, kv: str) -> list[KvCache]:
    return decoder.make_caches(-(-tokens // BLOCK_TOKENS), KV_DTYPES[kv], "cuda")


def read_prompt(decoder: Decoder, tokens: Tensor, kv: str, steps: int = 1) -> list[KvCache]:
    """The caches of a prompt, read in so many steps."""
    pages = (PROMPT + AFTER) // BLOCK_TOKENS
    caches = caches_of(decoder, PROMPT + AFTER, kv)
    for number in range(steps):
        decoder(make_step(tokens, number * PROMPT // steps, (number + 1) * PROMPT // steps, pages), caches)
    return caches


def continued(decoder: Decoder, tokens: Tensor, caches: Sequence[KvCache]) -> Tensor:
    """Log-probabilities after each of the next tokens, one step each."""
    pages = (PROMPT + AFTER) // BLOCK_TOKENS
    found = [decoder(make_step(tokens, at, at + 1, pages), caches) for at in range(PROMPT, PROMPT + AFTER)]
    return torch.cat(found).double().log_softmax(-1)


def told_difference(found: Tensor, wanted: Tensor) -> str:
    """Of log-probabilities [rows, vocabulary]."""
    difference = (found - wanted).abs()
    divergence = (wanted.exp() * (wanted - found)).sum(-1)
    same = (found.argmax(-1) == wanted.argmax(-1)).double().mean()
    return (
        f"log-probabilities differ by {difference.max():.3f} at most, {difference.mean():.4f} on average; "
        f"KL {divergence.mean():.1e} (largest {divergence.max():.1e}); same first token {same:.0%}"
    )


def error(decoder: Decoder, tokens: Tensor, prompts: dict[str, list[KvCache]]) -> None:
    wanted = continued(decoder, tokens, prompts["bf16"])
    print(
        f"fp8 against bf16, {AFTER} tokens after {PROMPT:,}: {told_difference(continued(decoder, tokens, prompts['fp8']), wanted)}"
    )
    again = continued(decoder, tokens, read_prompt(decoder, tokens, "bf16", steps=2))
    print(f"bf16, the prompt in two steps:          {told_difference(again, wanted)}", flush=True)


def filled(decoder: Decoder, batch: int, tokens: int, kv: str, prompt: Sequence[KvCache]) -> list[KvCache]:
    """With the pages of the prompt, over and over."""
    pages, caches = PROMPT // BLOCK_TOKENS, caches_of(decoder, batch * tokens, kv)
    for cache, source in zip(caches, prompt, strict=True):
        for to, from_ in zip(cache.parts, source.parts, strict=True):
            to, from_ = (part.view(torch.uint8) for part in (to, from_))
            to.unflatten(0, (-1, pages)).copy_(from_[None, :pages].expand(to.shape[0] // pages, *from_[:pages].shape))
    return caches


def decode_step(batch: int, tokens: int) -> Step:
    first = torch.arange(batch, dtype=torch.int32)[:, None] * 77 + 5
    return make_step(first.expand(batch, tokens), tokens - 1, tokens, tokens // BLOCK_TOKENS)


def graphed(work: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Seconds of the best of a few replays, and the result."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    times = []
    for _ in range(8):
        begun, done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begun.record()
        graph.replay()
        done.record()
        done.synchronize()
        times.append(begun.elapsed_time(done) / 1e3)
    return min(times), result.clone()


def attended(fused: FusedDecoder, step: Step, caches: Sequence[KvCache], shape: tuple[int, int] | None = None) -> Tensor:
    """The attention of all layers, one after another, and nothing else. `shape`: other warps and pages in flight than the Engine takes."""
    space, mixer = fused.space(step), fused.layers[0].mixer
    qkv = torch.ones(step.tokens.shape[0], fused.layers[0].qkv.rows, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(step.tokens.shape[0], mixer.num_heads * mixer.head_dim, dtype=torch.bfloat16, device="cuda")
    assert mixer.rotary is not None
    for cache in caches:
        assert cache.values is not None
        attention.decode_attention(
            qkv, mixer.rotary.table, step.positions, step.slots, step.lengths, step.blocks, cache.keys, cache.values, out,
            space.attention, scale=mixer.scale, splits=space.splits, shape=shape or space.shape,
            interleaved=mixer.rotary.interleaved, scales=cache.scales,
        )  # fmt: skip
    return out


def timed(
    decoder: Decoder, batch: int, tokens: int, kv: str, prompt: Sequence[KvCache], limit: float, wanted: Tensor | None,
    *, shapes: bool = False,
) -> Tensor | None:  # fmt: skip
    """The logits' log-probabilities; None: it does not fit."""
    needed = batch * tokens * kv_token_bytes(decoder.spec, kv)
    told = f"{kv} {batch} x {tokens:6d} tokens, {needed / 1e9:5.1f} GB"
    if needed + SPARE_BYTES > torch.cuda.mem_get_info()[0]:
        print(f"{told}: does not fit", flush=True)
        return None
    caches, step = filled(decoder, batch, tokens, kv, prompt), decode_step(batch, tokens)
    fused = decoder.fused
    assert isinstance(fused, FusedDecoder)
    seconds, logits = graphed(lambda: decoder(step, caches))
    reading, _ = graphed(lambda: attended(fused, step, caches))
    found = logits.double().log_softmax(-1)
    compared = "" if wanted is None else f"; against bf16: {told_difference(found, wanted)}"
    print(
        f"{told}: {seconds * 1e3:7.3f} ms a step, {batch / seconds:7.1f} tok/s; attention alone {reading * 1e3:7.3f} ms, "
        f"{needed / reading / 1e12:.2f} TB/s, {needed / reading / limit:.0%} of {limit / 1e12:.2f}{compared}",
        flush=True,
    )
    for shape in SHAPES if shapes and tokens > PROMPT else ():
        seconds, _ = graphed(lambda shape=shape: attended(fused, step, caches, shape))
        print(
            f"    {shape[0]} warps, {shape[1]} pages of bf16 in flight: {seconds * 1e3:.3f} ms, {needed / seconds / 1e12:.2f} TB/s",
            flush=True,
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="GLM-4.5-Air")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--shapes", action="store_true", help="attention with other numbers of warps and pages in flight too")
    options = parser.parse_args()
    began = time.perf_counter()
    limit = device_read_speed("cuda")
    _, spec = shape_of(options.model, options.layers)
    weights = RandomWeights(spec, rules(spec), quant=scheme("int4", 128), device="cuda", tiled=True)
    decoder = Decoder(spec, weights, max(tokens for _, tokens in CASES))
    torch.cuda.empty_cache()
    free = spare_bytes(torch.cuda.mem_get_info()[0], defaults_of("cuda"))
    print(
        f"{torch.cuda.get_device_name()}, {options.model}, {spec.num_layers} layers: made in {time.perf_counter() - began:.0f} s"
    )
    for kv in KV:
        per_token = kv_token_bytes(spec, kv)
        print(f"{kv}: {per_token:,} bytes a token, {free // per_token:,} tokens fit beside the weights", flush=True)
    tokens = torch.randint(0, spec.vocab_size, (1, PROMPT + AFTER), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        for kv in KV:  # several kernels at a time
            decoder.prepare(PROMPT, [decode_step(*case) for case in CASES], caches_of(decoder, 1, kv))
        print(f"compiled after {time.perf_counter() - began:.0f} s", flush=True)
        prompts = {kv: read_prompt(decoder, tokens, kv) for kv in KV}
        error(decoder, tokens, prompts)
        for batch, length in CASES:
            wanted = None
            for kv in KV:
                torch.cuda.empty_cache()
                wanted = timed(decoder, batch, length, kv, prompts[kv], limit, wanted, shapes=options.shapes)
    print(f"{time.perf_counter() - began:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
