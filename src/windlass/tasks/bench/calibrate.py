"""Measures what a plan needs to know of this machine: memory, products, the link to the device, disk, launches. About half a minute."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch

from windlass.core.hardware.measured import MeasuredLimits
from windlass.runtime.machine.bandwidth import measure as measure_reads
from windlass.runtime.machine.disk import read_speed
from windlass.tasks.bench.limits import READ_TRIALS, fastest, measure_limits, synchronize

LINK_BYTES = 2**28
LAUNCHES = 1000


def calibrate(device: str, num_threads: int, folder: Path, told: Callable[[str], None] = lambda _: None) -> MeasuredLimits:
    """`told` is given the name of each part before it is measured."""
    told("memory and products")
    limits = measure_limits(device, num_threads)
    host = link = 0.0
    if device != "cpu":
        told("host memory and the link")
        host = max(measure_reads(num_threads) or 0.0 for _ in range(READ_TRIALS))
        link = _link_speed(device)
    told("disk")
    try:
        disk = read_speed(folder)
    except OSError:
        disk = 0.0
    told("launches")
    return MeasuredLimits(
        read_bytes_per_second=limits.read_bytes_per_second,
        matmul_flops=limits.matmul_flops,
        date=time.strftime("%Y-%m-%d"),
        host_read_bytes_per_second=host,
        link_bytes_per_second=link,
        disk_bytes_per_second=disk,
        launch_seconds=_launch_seconds(device),
    )


def _link_speed(device: str) -> float:
    """Pinned host memory to the device."""
    pinned = device.startswith("cuda")
    source = torch.zeros(LINK_BYTES, dtype=torch.uint8, pin_memory=pinned)
    target = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    return LINK_BYTES / fastest(lambda: target.copy_(source, non_blocking=True), device)


def _launch_seconds(device: str) -> float:
    """Of a tiny operation, launched many times in a row."""
    value = torch.zeros(1, device=device)
    value.add_(1)
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(LAUNCHES):
        value.add_(1)
    synchronize(device)
    return (time.perf_counter() - begin) / LAUNCHES
