"""Measures the limits of a device: memory read bandwidth and matmul throughput. Takes about a second.

They bound a step (roofline): bytes read over bandwidth, operations over throughput.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from windlass.core.model import Frozen
from windlass.runtime.machine.bandwidth import measure as measure_reads

READ_TRIALS = 5
CPU_SIZE, GPU_SIZE = 1024, 8192
"""Size of the square matrices: large enough to keep every core or SM busy, small enough for a few trials."""
GPU_READ_BYTES = 2**31
"""Much larger than any cache."""
SECONDS = 0.5
MIN_TRIALS = 3


class MachineLimits(Frozen):
    read_bytes_per_second: float
    matmul_flops: float
    matmul_dtype: str
    """Of the measured matmul: fp32 on a CPU, bf16 on an accelerator."""

    def at_least(self, other: MachineLimits) -> MachineLimits:
        """The better of two measurements: other processes can only slow one down."""
        return MachineLimits(
            read_bytes_per_second=max(self.read_bytes_per_second, other.read_bytes_per_second),
            matmul_flops=max(self.matmul_flops, other.matmul_flops),
            matmul_dtype=self.matmul_dtype,
        )


def measure_limits(device: str, num_threads: int) -> MachineLimits:
    if device == "cpu":
        reads = max(measure_reads(num_threads) or 0.0 for _ in range(READ_TRIALS))
        return MachineLimits(read_bytes_per_second=reads, matmul_flops=cpu_matmul_flops(num_threads), matmul_dtype="fp32")
    return MachineLimits(
        read_bytes_per_second=device_read_speed(device),
        matmul_flops=matmul_flops(device, GPU_SIZE, torch.bfloat16),
        matmul_dtype="bf16",
    )


def cpu_matmul_flops(num_threads: int) -> float:
    """With as many threads as the kernels use; restores torch's thread count."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return matmul_flops("cpu", CPU_SIZE, torch.float32)
    finally:
        torch.set_num_threads(before)


def matmul_flops(device: str, size: int, dtype: torch.dtype) -> float:
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2.0 * size**3 / fastest(lambda: torch.mm(left, right, out=out), device)


def device_read_speed(device: str) -> float:
    """Bandwidth of a sum, which reads everything and writes almost nothing."""
    data = torch.zeros(GPU_READ_BYTES // 4, device=device, dtype=torch.float32)
    return GPU_READ_BYTES / fastest(data.sum, device)


def fastest(work: Callable[[], Tensor], device: str) -> float:
    """Seconds of the best of several trials, after a warmup."""
    work()
    synchronize(device)
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < MIN_TRIALS or time.perf_counter() - begin < SECONDS:
        started = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - started)
    return min(times)


def synchronize(device: str) -> None:
    """Accelerators run asynchronously."""
    kind = device.split(":")[0]
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()
