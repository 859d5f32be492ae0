"""Matrix products of the CPU kernels against what the machine can do. Run: python bench/kernels/matmul.py [--rounds 9] [--isa avx2]

Every case takes its turn in every round together with a plain read of as much memory, so that a busy machine slows both alike; the
share is the median of the ratios within rounds. Matrices are many and far larger than caches together, so that one row reads memory
and nothing else. Products of 128 rows are compared with products whose operands never leave the nearest cache ("peak").
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

SHAPES = ((2048, 8192), (8192, 2048), (2048, 2048), (576, 1536), (1536, 576), (576, 576))
"""(in, out): a 1.10B shape, and SmolLM2-135M's."""
MOE = (64, 8, 2048, 1408)
"""Experts, active ones, hidden size and width."""
MEMORY_BYTES = 160 * 2**20
GROUP = 32


@dataclass(frozen=True)
class Row:
    case: str
    rows: int
    milliseconds: float
    gigabytes_per_second: float
    share_of_read: float
    gigaoperations_per_second: float
    share_of_peak: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", default="1,2,4,8,16,128")
    parser.add_argument("--kind", default="int4", help="int4, int4_zeros, int4_minima, int8, fp8, bfloat16, float32")
    parser.add_argument("--isa", choices=("plain", "avx2", "avx512"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.isa:
        os.environ["WINDLASS_ISA"] = options.isa  # read once, when the library is first used
    found = [row for count in options.rows.split(",") for row in measured(int(count), options.kind, options.rounds)]
    print(json.dumps([asdict(row) for row in found], indent=1) if options.json else table(found))


def measured(rows: int, kind: str, rounds: int) -> list[Row]:
    return [*(linear_row(num_in, num_out, rows, kind, rounds) for num_in, num_out in SHAPES), experts_row(rows, kind, rounds)]


def matrix(kind: str, num_out: int, num_in: int, experts: int = 0) -> object:
    from windlass.runtime.kernels.packing.panels import Panels

    if kind in ("bfloat16", "float32"):
        shape = (experts, num_out, num_in) if experts else (num_out, num_in)
        return torch.empty(shape, dtype=getattr(torch, kind)).uniform_(-0.03, 0.03)
    scale = torch.float32 if kind == "fp8" else torch.bfloat16
    return Panels.random(kind, num_out, num_in, 128 if kind == "fp8" and num_in % 128 == 0 else GROUP, experts, scale)


def num_bytes(weight: object) -> int:
    return weight.num_bytes if not isinstance(weight, torch.Tensor) else weight.numel() * weight.element_size()


def linear_row(num_in: int, num_out: int, rows: int, kind: str, rounds: int) -> Row:
    from windlass.runtime.kernels.cpu import linear as native_linear

    first = matrix(kind, num_out, num_in)
    count = max(1, MEMORY_BYTES // num_bytes(first)) if rows <= 16 else max(1, 16 * 2**20 // num_bytes(first))
    weights = [first, *(matrix(kind, num_out, num_in) for _ in range(count - 1))]
    x = torch.randn(rows, num_in)
    work = recorded(rows, lambda: [native_linear.linear(x, weight) for weight in weights])
    operations = 2.0 * rows * num_in * num_out * count
    return timed(kind, f"{num_in} -> {num_out}", rows, work, num_bytes(first) * count, operations, count, rounds)


def experts_row(rows: int, kind: str, rounds: int) -> Row:
    from windlass.core.model import Activation
    from windlass.runtime.kernels.arguments import ExpertsArgs
    from windlass.runtime.kernels.cpu import experts as native_experts

    experts, active, hidden, width = MOE
    gate_up, down = matrix(kind, 2 * width, hidden, experts), matrix(kind, hidden, width, experts)
    x, weights = torch.randn(rows, hidden), torch.rand(rows, active)
    # A replay repeats what was recorded, so several choices of experts are recorded: weights must come from memory.
    steps = max(1, experts // (active * rows))
    draw = torch.Generator().manual_seed(0)
    order = [
        torch.cat([torch.randperm(experts, generator=draw) for _ in range(-(-rows * active // experts))]) for _ in range(steps)
    ]
    if steps > 1:
        order = list(torch.randperm(experts, generator=draw).view(steps, -1))
    ids = [one[: rows * active].view(rows, active).to(torch.int32).contiguous() for one in order]
    work = recorded(
        rows, lambda: [native_experts.experts(ExpertsArgs(x, one, weights, gate_up, down, Activation.SILU)) for one in ids]
    )
    distinct = sum(len(one.unique()) for one in ids)
    read = (num_bytes(gate_up) + num_bytes(down)) // experts * distinct
    operations = 2.0 * 3 * hidden * width * rows * active * steps
    return timed(kind, f"{experts} experts of {hidden} x {width}", rows, work, read, operations, steps, rounds)


def recorded(rows: int, work: Callable[[], object]) -> Callable[[], None]:
    from windlass.runtime.kernels.program import program

    counter = torch.tensor([rows], dtype=torch.int32)
    with program.record(counter) as made:
        work()
    return made.run


def timed(
    kind: str, case: str, rows: int, work: Callable[[], None], read_bytes: int, operations: float, count: int, rounds: int
) -> Row:
    from windlass.runtime.kernels.cpu import limits as native_limits
    from windlass.runtime.kernels.packing.large_pages import memory as allocate

    memory = allocate(max(read_bytes, MEMORY_BYTES)).fill_(1)
    seconds, shares, peaks = [], [], []
    work()
    for _ in range(rounds):
        spent = clock(work)
        seconds.append(spent)
        shares.append(read_bytes / spent / (memory.numel() / clock(lambda: native_limits.read(memory))))
        if rows > 2 and kind.startswith("int"):
            peaks.append(operations / spent / native_limits.int8_operations_per_second(times=500))
    best = statistics.median(seconds)
    return Row(
        case, rows, best / count * 1e3, read_bytes / best / 1e9, statistics.median(shares), operations / best / 1e9,
        statistics.median(peaks) if peaks else 0.0,
    )  # fmt: skip


def clock(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def table(rows: list[Row]) -> str:
    head = f"{'case':32} {'rows':>5} {'ms':>9} {'GB/s':>7} {'of read':>8} {'GOP/s':>7} {'of peak':>8}"
    lines = [
        f"{row.case:32} {row.rows:5} {row.milliseconds:9.3f} {row.gigabytes_per_second:7.1f} {row.share_of_read:8.0%} "
        f"{row.gigaoperations_per_second:7.0f} {row.share_of_peak:8.0%}"
        for row in rows
    ]
    return "\n".join((head, *lines))


if __name__ == "__main__":
    main()
