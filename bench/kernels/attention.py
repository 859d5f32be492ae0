"""What the operations between the matrices cost on this CPU. Run: python bench/kernels/attention.py [--threads 2] [--seconds 0.3] [--json FILE]

- Decode: attention of one new token per sequence over a bf16 cache. GB/s count every cached key and value once, and stand beside what
  plain reads of as many bytes reach with as many threads (numpy's sum over bytes viewed as 64-bit integers, a thread per share).
- Prefill: attention of a whole prompt. GFLOP/s count what causal attention needs: 4 * head dim per query, head and key that it sees.
- The small operations, at decode: microseconds each, replayed from a program, so that no Python is in them.

Caches rotate where they are smaller than the last-level cache, so that a decode step finds its layer's keys where a real one does:
in memory. "cached" rows do not rotate.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from windlass.core.model import Activation
from windlass.runtime.kernels.arguments import AttentionArgs, QkvArgs
from windlass.runtime.kernels.cpu import activate as native_activate
from windlass.runtime.kernels.cpu import attention as native_attention
from windlass.runtime.kernels.cpu import norm as native_norm
from windlass.runtime.kernels.cpu import qkv as native_qkv
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.step import BLOCK_TOKENS, KvCache, Step, attention_cache

MEMORY_BYTES = 256 * 2**20
"""Caches together: far beyond a last-level cache."""


@dataclass(frozen=True)
class Shape:
    name: str
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    ffn: int


SHAPES = (
    Shape("135M (9/3 heads of 64)", 576, 9, 3, 64, 1536),
    Shape("1.10B (32/8 heads of 64)", 2048, 32, 8, 64, 8192),
    Shape("8B (32/8 heads of 128)", 4096, 32, 8, 128, 14336),
)


clock = time.perf_counter
"""With a single thread, that thread's own time: what others take of the machine is not counted."""


def whole(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step_of(sequences: int, length: int, new: int) -> Step:
    rows, per_sequence = sequences * new, -(-length // BLOCK_TOKENS)
    return Step(
        tokens=torch.zeros(rows, dtype=torch.int32),
        positions=torch.arange(length - new, length, dtype=torch.int32).repeat(sequences),
        slots=torch.arange(rows, dtype=torch.int32),
        starts=torch.arange(0, rows + 1, new, dtype=torch.int32),
        lengths=torch.full((sequences,), length, dtype=torch.int32),
        blocks=torch.arange(sequences * per_sequence, dtype=torch.int32).view(sequences, per_sequence),
        logit_rows=torch.zeros(0, dtype=torch.int32),
        counts=whole([rows, sequences, 0]),
    )


def seconds_per_run(recorded: program.Program, seconds: float) -> float:
    """The best of many runs: others may be using the machine."""
    recorded.run()
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times) < 5:
        started = clock()
        recorded.run()
        times.append(clock() - started)
    return min(times)


def repeated(operation: Callable[[int], object], count: int, rows: int) -> program.Program:
    with program.record(whole([rows])) as recorded:
        for index in range(count):
            operation(index)
    return recorded


# --- attention --------------------------------------------------------------------------------------------------------


def attention_seconds(shape: Shape, sequences: int, length: int, new: int, seconds: float, rotate: bool) -> float:
    step = step_of(sequences, length, new)
    blocks = step.blocks.numel()
    cache_bytes = 4 * blocks * BLOCK_TOKENS * shape.kv_heads * shape.dim
    count = max(1, min(MEMORY_BYTES // cache_bytes, 500)) if rotate else 1
    caches: list[KvCache] = [attention_cache(blocks, shape.kv_heads, shape.dim, torch.bfloat16) for _ in range(count)]
    for cache in caches:
        cache.keys.normal_()
        assert cache.values is not None
        cache.values.normal_()
    q = torch.randn(sequences * new, shape.heads, shape.dim)

    def attend(index: int) -> None:
        cache = caches[index % count]
        native_attention.attention(
            AttentionArgs(q, q, q, step, cache, scale=shape.dim**-0.5, window=None, sinks=None, slopes=None)
        )

    runs = max(count, 8)
    return seconds_per_run(repeated(attend, runs, q.shape[0]), seconds) / runs


def read_gb_per_second(num_bytes: int, threads: int, seconds: float) -> float:
    num_bytes = max(num_bytes, MEMORY_BYTES)
    memory = np.ones(num_bytes // 8, dtype=np.int64)
    shares = np.array_split(memory, threads)
    best = 0.0
    until = time.perf_counter() + seconds
    with ThreadPoolExecutor(threads) as pool:
        while time.perf_counter() < until:
            started = time.perf_counter()
            list(pool.map(np.sum, shares))
            best = max(best, num_bytes / (time.perf_counter() - started) / 1e9)
    return best


def decode(threads: int, seconds: float) -> list[dict[str, object]]:
    reading = read_gb_per_second(0, threads, 1.0)
    print(f"plain reads: {reading:.1f} GB/s")
    rows: list[dict[str, object]] = []
    for shape in SHAPES:
        for sequences, length in ((1, 128), (1, 4096), (1, 32768), (8, 128), (8, 4096), (64, 512)):
            for rotate in (False, True):
                took = attention_seconds(shape, sequences, length, 1, seconds, rotate)
                rate = 4 * sequences * length * shape.kv_heads * shape.dim / took / 1e9
                where = "memory" if rotate else "cached"
                print(
                    f"decode {shape.name:26} {sequences:3} x {length:6} {where}: {took * 1e6:9.1f} us {rate:6.1f} GB/s {rate / reading:5.0%}"
                )
                rows.append(
                    {
                        "shape": shape.name,
                        "sequences": sequences,
                        "tokens": length,
                        "where": where,
                        "seconds": took,
                        "gb_per_second": rate,
                    }
                )
    return rows


def prefill(seconds: float) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for shape in SHAPES:
        for length, new in ((128, 128), (512, 512), (4096, 512)):
            took = attention_seconds(shape, 1, length, new, seconds, False)
            seen = sum(range(length - new + 1, length + 1))
            rate = 4 * shape.dim * shape.heads * seen / took / 1e9
            print(f"prefill {shape.name:26} {new} of {length}: {took * 1e6:9.1f} us {rate:6.1f} GFLOP/s")
            rows.append({"shape": shape.name, "new": new, "tokens": length, "seconds": took, "gflop_per_second": rate})
    return rows


# --- the others -------------------------------------------------------------------------------------------------------


def small(seconds: float) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for shape in SHAPES:
        for rows in (1, 8, 128):
            for name, operation in operations(shape, rows).items():
                took = seconds_per_run(repeated(lambda index, call=operation: call(), 200, rows), seconds) / 200
                print(f"{name:10} {shape.name:26} {rows:4} rows: {took * 1e6:8.2f} us")
                found.append({"operation": name, "shape": shape.name, "rows": rows, "seconds": took})
    return found


def operations(shape: Shape, rows: int) -> dict[str, Callable[[], object]]:
    x, weight = torch.randn(rows, shape.hidden), torch.randn(shape.hidden)
    inner = torch.randn(rows, 2 * shape.ffn)
    step = step_of(1, rows, rows)
    cache = attention_cache(step.blocks.numel(), shape.kv_heads, shape.dim, torch.bfloat16)
    table = torch.randn(4096, 2, shape.dim // 2)
    qkv = torch.randn(rows, (shape.heads + 2 * shape.kv_heads) * shape.dim)

    def split() -> object:
        where = {"positions": step.positions, "cache": cache, "slots": step.slots}
        return native_qkv.split_qkv(
            QkvArgs(qkv, shape.heads, shape.kv_heads, shape.dim, norms=None, eps=1e-5, table=table, interleaved=False, **where)
        )

    return {
        "norm": lambda: native_norm.norm(x, weight, None, 1e-5, "rms"),
        "add": lambda: native_norm.add(x, x),
        "split_qkv": split,
        "activate": lambda: native_activate.activate(inner, Activation.SILU, True),
    }


def main() -> None:
    global clock
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--threads", type=int, default=program.num_threads())
    options.add_argument("--seconds", type=float, default=0.3, help="for each measurement")
    options.add_argument("--only", choices=("decode", "prefill", "small"))
    options.add_argument("--json", type=Path)
    chosen = options.parse_args()
    program.set_threads(chosen.threads)
    clock = time.thread_time if chosen.threads == 1 else time.perf_counter
    torch.set_num_threads(chosen.threads)
    parts = {
        "small": lambda: small(chosen.seconds),
        "decode": lambda: decode(chosen.threads, chosen.seconds),
        "prefill": lambda: prefill(chosen.seconds),
    }
    results = {name: part() for name, part in parts.items() if chosen.only in (None, name)}
    if chosen.json:
        chosen.json.write_text(json.dumps({"threads": chosen.threads, **results}, indent=1))


if __name__ == "__main__":
    main()
