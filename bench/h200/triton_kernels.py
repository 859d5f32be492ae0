"""The general GPU kernels (runtime/kernels/triton) on a real GPU: right, free of waiting, captured in graphs, and how fast.

Run: PYTHONPATH=src python bench/h200/triton_kernels.py [right|models|fast ...] (all by default; needs torch, triton, numpy and msgspec)
With PART=0/4 in the environment `right` does every fourth case.

right   every case of tests/runtime/kernels/triton/triton_cases, the large ones too, kernel against reference
models  whole steps of tiny models: fp32 against the CPU's references; bf16 captured in a graph, replayed and run at once, bit for bit;
        and no operation may wait for the device
fast    microseconds and GB/s (or TFLOP/s) at the shapes of SmolLM2, Qwen3-30B-A3B and Llama-70B
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ["WINDLASS_NO_NATIVE"] = "1"  # what runs on the CPU is the reference
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "runtime" / "kernels" / "triton"))

import torch
from torch import Tensor
from triton_cases import CASES, LARGE, models
from triton_cases.attention import make_step

from windlass.core.model import Activation
from windlass.runtime.kernels.arguments import AttentionArgs, ExpertsArgs
from windlass.runtime.kernels.packing.packed_rows import PackedRows
from windlass.runtime.kernels.step import attention_cache
from windlass.runtime.kernels.triton import ops

FAMILIES = ("llama", "qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "mixtral", "falcon-rw", "gpt2")
DISTINCT_BYTES = 400e6
"""Timed weights are so many that the L2 cache does not hold them until they come round again."""


def reported(name: str, check: Callable[[], None]) -> bool:
    try:
        check()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 (all are reported, and the rest goes on)
        where = traceback.extract_tb(error.__traceback__)[-1]
        print(
            f"FAILED {name}: {type(error).__name__}: {str(error)[-400:]} ({Path(where.filename).name}:{where.lineno})", flush=True
        )
        return False
    return True


def right() -> int:
    every = {**CASES, **{f"large {name}": check for name, check in LARGE.items()}}
    part, parts = (int(n) for n in os.environ.get("PART", "0/1").split("/"))  # several processes compile faster than one
    checks = {name: check for number, (name, check) in enumerate(every.items()) if number % parts == part}
    started = time.perf_counter()
    failed = [name for name, check in checks.items() if not reported(name, lambda check=check: check("cuda"))]
    print(f"right: {len(checks) - len(failed)} of {len(checks)} cases, {time.perf_counter() - started:.0f} s", flush=True)
    return len(failed)


# --- whole models


def exact(family: str, kind: str | None) -> None:
    """fp32 on the GPU and on the CPU."""
    wanted = models.logits(*models.decoder(family, "cpu", torch.float32, kind), "cpu")
    mine = models.logits(*models.decoder(family, "cuda", torch.float32, kind), "cuda")
    torch.testing.assert_close(mine.cpu(), wanted, atol=1e-3, rtol=1e-3)


def captured(family: str, kind: str | None) -> None:
    """bf16: a decode step without any waiting, and as a graph, which must say the very same."""
    decoder, caches = models.decoder(family, "cuda", torch.bfloat16, kind)
    models.logits(decoder, caches, "cuda")
    step = models.step_of(decoder.spec, models.LENGTHS, [length + 1 for length in models.LENGTHS], "cuda")
    with torch.no_grad():
        torch.cuda.set_sync_debug_mode("error")
        try:
            at_once = decoder(step, caches)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = decoder(step, caches)
        graph.replay()
    torch.cuda.synchronize()
    assert at_once.isfinite().all(), "not all logits are numbers"
    assert torch.equal(at_once, replayed), f"a replay differs by {(at_once - replayed).abs().max().item():.1e}"


def whole_models() -> int:
    failed = 0
    for family in FAMILIES:
        for kind in (None, "int4") if family in ("llama", "qwen3_moe", "deepseek_v3", "glm4_moe") else (None,):
            for check in (exact, captured):
                name = f"{check.__name__} {family} {kind or 'plain'}"
                failed += not reported(name, lambda check=check, family=family, kind=kind: check(family, kind))
    print(f"models: {failed} failed", flush=True)
    return failed


# --- speed


def seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Of one call, the calls one after another in a graph: what the device needs, without the host."""
    for call in calls[:2]:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times: list[float] = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[2] / len(calls)


def copies(num_bytes: int) -> int:
    return max(1, min(64, round(DISTINCT_BYTES / num_bytes)))


def said(name: str, taken: float, num_bytes: float = 0, operations: float = 0) -> None:
    speed = f"{num_bytes / taken / 1e9:7.0f} GB/s" if num_bytes else f"{operations / taken / 1e12:7.1f} TFLOP/s"
    print(f"{name:58} {taken * 1e6:9.1f} us {speed}", flush=True)


LINEAR = {
    "SmolLM2 qkv": (960, 576, 64),
    "SmolLM2 head": (49152, 576, 64),
    "Qwen3-30B-A3B qkv": (5120, 2048, 128),
    "Llama-70B qkv": (10240, 8192, 128),
    "Llama-70B gate and up": (57344, 8192, 128),
    "Llama-70B down": (8192, 28672, 128),
}


def fast_linear() -> None:
    for name, (num_out, num_in, group) in LINEAR.items():
        for kind in ("int4",) if name != "Llama-70B qkv" else ("int4", "int4_zeros", "int8", "fp8"):
            scale = torch.float32 if kind == "fp8" else torch.bfloat16
            first = PackedRows.random(kind, num_out, num_in, group, 0, scale)
            weights = [
                first,
                *(PackedRows.random(kind, num_out, num_in, group, 0, scale) for _ in range(copies(first.nbytes) - 1)),
            ]
            for rows in (1, 8, 64, 2048) if name == "Llama-70B qkv" else (1, 8, 64):
                x = torch.randn(rows, num_in, device="cuda", dtype=torch.bfloat16)
                taken = seconds([lambda w=w, x=x: ops.linear(x, w) for w in weights])
                many = rows > 64
                said(
                    f"linear {name} {kind} {rows}", taken, 0 if many else first.nbytes, 2 * rows * num_out * num_in if many else 0
                )
            if kind == "int4":
                small = torch.randn(1, num_in, device="cuda", dtype=torch.bfloat16)
                plain = first.dense(dtype=torch.bfloat16)
                many = [plain.clone() for _ in range(copies(2 * plain.numel()))]
                said(f"  cuBLAS {name} bf16 1", seconds([lambda w=w, x=small: x @ w.T for w in many]), 2 * plain.numel())


def fast_experts() -> None:
    """Qwen3-30B-A3B: 128 experts, 8 active, hidden 2048, width 768."""
    layers = [
        (PackedRows.random("int4", 1536, 2048, 128, 128, seed=seed), PackedRows.random("int4", 2048, 768, 128, 128, seed=seed))
        for seed in range(2)
    ]
    for rows in (1, 8, 64, 2048):
        x, add = (torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        chosen = [torch.rand(rows, 128, device="cuda").topk(8).indices.int() for _ in range(8)]
        shares = torch.full((rows, 8), 0.125, device="cuda")
        taken = seconds(
            [
                lambda layer=layers[number % 2], ids=ids, x=x, add=add, shares=shares: ops.experts(
                    ExpertsArgs(x, ids, shares, *layer, Activation.SILU, add=add)
                )
                for number, ids in enumerate(chosen)
            ]
        )
        touched = sum(int(ids.unique().numel()) for ids in chosen) / len(chosen)
        num_bytes = touched / 128 * (layers[0][0].nbytes + layers[0][1].nbytes)
        name = f"experts Qwen3-30B-A3B int4 {rows} ({touched:.0f} touched)"
        said(name, taken, 0 if rows > 64 else num_bytes, 2 * rows * 8 * 3 * 2048 * 768 if rows > 64 else 0)


def fast_attention() -> None:
    for name, heads, kv_heads, dim in (("SmolLM2", 9, 3, 64), ("Qwen3-30B-A3B", 32, 4, 128), ("Llama-70B", 64, 8, 128)):
        for batch, length in ((1, 2048), (8, 2048), (64, 2048), (1, 32768), (8, 32768)):
            step = make_step([(length, 1)] * batch, "cuda")
            cache = attention_cache(step.blocks.numel(), kv_heads, dim, torch.bfloat16, "cuda")
            q = torch.randn(batch, heads, dim, device="cuda", dtype=torch.bfloat16)
            taken = seconds(
                [lambda q=q, step=step, cache=cache: ops.attention(AttentionArgs(q, q, q, step, cache, scale=0.1))] * 8
            )
            said(f"attention {name} {batch} x {length}", taken, 4 * batch * length * kv_heads * dim)
        step = make_step([(2048, 2048)], "cuda")
        cache = attention_cache(step.blocks.numel(), kv_heads, dim, torch.bfloat16, "cuda")
        q = torch.randn(2048, heads, dim, device="cuda", dtype=torch.bfloat16)
        taken = seconds([lambda q=q, step=step, cache=cache: ops.attention(AttentionArgs(q, q, q, step, cache, scale=0.1))] * 4)
        said(f"attention {name}, a prompt of 2048", taken, operations=2 * 2048 * 2048 * heads * dim)


def fast_rest() -> None:
    """What a step of a small model is made of: launches."""
    x = torch.randn(1, 2048, device="cuda", dtype=torch.bfloat16)
    weight: Tensor = torch.ones(2048, device="cuda")
    said("norm 1 x 2048", seconds([lambda: ops.norm(x, weight, None, 1e-5, "rms")] * 50), 8192)
    wide = torch.randn(1, 2 * 6144, device="cuda", dtype=torch.bfloat16)
    said("activate 1 x 6144", seconds([lambda: ops.activate(wide, Activation.SILU, True)] * 50), 6 * 6144)


def fast() -> int:
    parts = (fast_linear, fast_experts, fast_attention, fast_rest)
    return sum(not reported(part.__name__, part) for part in parts)


def main() -> int:
    import triton

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}", flush=True)
    all_parts = {"right": right, "models": whole_models, "fast": fast}
    failed = 0
    for name in sys.argv[1:] or all_parts:
        started = time.perf_counter()
        failed += all_parts[name]()
        print(f"{name} took {time.perf_counter() - started:.0f} s", flush=True)
    print("all right" if not failed else f"{failed} FAILED")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
