"""How fast weights are quantized, and what the scale search gains, as Markdown. Run: python bench/kernels/quantize.py [--megabytes 128]

GB/s are of bf16 input. Every scheme takes its turn in every round, so that a busy machine slows them all alike; the best round counts.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from windlass.runtime.kernels import build
from windlass.runtime.kernels.packing import quantize, repack

INPUTS = 8192
TORCH_ROWS = 256
SCHEMES: dict[str, Callable[[torch.Tensor], object]] = {
    "int4, groups of 128": lambda rows: quantize.int4(rows, 128),
    "int4, groups of 128, fast search": lambda rows: quantize.int4(rows, 128, search="fast"),
    "int4, groups of 128, no search": lambda rows: quantize.int4(rows, 128, search="none"),
    "int4, groups of 32": lambda rows: quantize.int4(rows, 32),
    "int4, groups of 128, zero points": lambda rows: quantize.int4(rows, 128, zero_points=True),
    "int8, groups of 128": lambda rows: quantize.int8(rows, 128),
    "int8, rows": lambda rows: quantize.int8(rows),
    "fp8, rows": lambda rows: quantize.fp8(rows),
}


def seconds(operation: Callable[[], object]) -> float:
    start = time.perf_counter()
    operation()
    return time.perf_counter() - start


def on_threads(work: Callable[[torch.Tensor], object], weight: torch.Tensor, num_threads: int, pool: ThreadPoolExecutor) -> None:
    list(pool.map(work, weight.chunk(8 * num_threads)))


def without_native(work: Callable[[torch.Tensor], object], rows: torch.Tensor) -> float:
    os.environ["WINDLASS_NO_NATIVE"] = "1"
    try:
        return rows.nbytes / seconds(lambda: work(rows))
    finally:
        del os.environ["WINDLASS_NO_NATIVE"]


def speeds(weight: torch.Tensor, rounds: int) -> dict[str, dict[str, float]]:
    copy = torch.empty_like(weight)
    limits: dict[str, Callable[[torch.Tensor], object]] = {"memcpy": lambda rows: copy[: rows.shape[0]].copy_(rows)}
    best: dict[str, dict[str, float]] = {name: {} for name in (*limits, *SCHEMES)}
    for _ in range(rounds):
        for name, work in (limits | SCHEMES).items():
            for num_threads in (1, 2):
                with ThreadPoolExecutor(num_threads) as pool:
                    took = seconds(lambda work=work, n=num_threads, pool=pool: on_threads(work, weight, n, pool))
                column = f"{num_threads} threads"
                best[name][column] = max(best[name].get(column, 0.0), weight.nbytes / took)
            if name in SCHEMES:
                best[name]["torch"] = max(best[name].get("torch", 0.0), without_native(work, weight[:TORCH_ROWS]))
    return best


def print_speeds(weight: torch.Tensor, rounds: int) -> None:
    print(
        f"{weight.nbytes / 1e6:.0f} MB of bf16, rows of {INPUTS}; {quantize.instruction_set()}", build.why_not("quantize") or ""
    )
    print("\n| GB/s of input | 1 thread | 2 threads | torch |\n|---|---|---|---|")
    for name, row in speeds(weight, rounds).items():
        slow = f"{row['torch'] / 1e9:.3f}" if "torch" in row else ""
        print(f"| {name} | {row['1 threads'] / 1e9:.2f} | {row['2 threads'] / 1e9:.2f} | {slow} |")
    blocks = torch.zeros(4096, 18 * 256, dtype=torch.uint8)
    print(f"\nQ4_0 blocks carried over: {blocks.nbytes / seconds(lambda: repack.q4_0(blocks)) / 1e9:.2f} GB/s of blocks")


def print_gains() -> None:
    """Relative RMS error, against the largest magnitude over 7 and over 7.5, the usual ways."""
    torch.manual_seed(0)
    samples = {
        "Gaussian": torch.randn(1024, 4096),
        "Laplace": torch.distributions.Laplace(0.0, 1.0).sample((1024, 4096)),
        "Student's t, 4 degrees": torch.distributions.StudentT(4.0).sample((1024, 4096)),
    }
    print("\n| relative RMS error, % | group | max / 7 | max / 7.5 | none | fast | full | zero points | int8 | fp8 rows |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, sample in samples.items():
        for group in (128, 64, 32):
            weight = sample.bfloat16()
            found = [plain(weight, group, over) for over in (7.0, 7.5)]
            found += [quantize.int4(weight, group, search=search).statistics.relative_rms for search in ("none", "fast", "full")]
            found += [quantize.int4(weight, group, zero_points=True).statistics.relative_rms]
            found += [quantize.int8(weight, group).statistics.relative_rms, quantize.fp8(weight).statistics.relative_rms]
            print(f"| {name} | {group} | " + " | ".join(f"{100 * value:.2f}" for value in found) + " |")


def plain(weight: torch.Tensor, group: int, over: float) -> float:
    x = weight.float().view(-1, group)
    scale = (x.abs().amax(1, keepdim=True) / over).bfloat16().float()
    error = x - (x / scale).round().clamp(-8, 7) * scale
    return float((error.double().square().sum() / x.double().square().sum()).sqrt())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)  # threads are ours to count
    rows = asked.megabytes * 10**6 // (2 * INPUTS)
    print_speeds((torch.randn(rows, INPUTS) * 0.02).bfloat16(), asked.rounds)
    print_gains()


if __name__ == "__main__":
    main()
