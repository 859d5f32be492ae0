"""The same matmul and copy on every machine, for `windlass check`: `python -m windlass.runtime.parallel.work_speed SIZE DEVICE`. Prints JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

WINDOWS, WINDOW_SECONDS = 3, 0.25
"""Long enough for what slows a machine under load: lowered clocks, a quota of the cgroup (whose period is 0.1 s)."""


def measure_work(size: int, device: str) -> dict[str, float]:
    """TFLOP/s of a matmul and GB/s of a copy; each over a quarter of a second, the best of three."""
    on = torch.device(device)
    kind = torch.bfloat16 if on.type == "cuda" else torch.float32
    one, other = torch.randn(size, size, device=on, dtype=kind), torch.randn(size, size, device=on, dtype=kind)
    source = torch.empty(16 * 2**20, dtype=torch.float32, device=on)
    target = torch.empty_like(source)
    matmul = _best(lambda: torch.matmul(one, other), on)
    copy = _best(lambda: target.copy_(source), on)
    return {"matmul_tflops": 2 * size**3 / matmul / 1e12, "copy_gbytes": 2 * source.nbytes / copy / 1e9}


def _best(call: Callable[[], object], on: torch.device) -> float:
    """Seconds of one call, by the best window."""
    return min(_window(call, on) for _ in range(WINDOWS))


def _window(call: Callable[[], object], on: torch.device) -> float:
    _settle(on)
    began, count = time.perf_counter(), 0
    while not count or time.perf_counter() - began < WINDOW_SECONDS:
        call()
        _settle(on)
        count += 1
    return (time.perf_counter() - began) / count


def _settle(on: torch.device) -> None:
    if on.type == "cuda":
        torch.cuda.synchronize(on)


if __name__ == "__main__":
    print(json.dumps(measure_work(int(sys.argv[1]), sys.argv[2])))
