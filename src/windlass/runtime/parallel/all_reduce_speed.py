"""One rank of an all-reduce: `python -m windlass.runtime.parallel.all_reduce_speed RANK WORLD ADDRESS PORT BACKEND SIZES`. Prints JSON.

Bus bandwidth as nccl-tests counts it: 2 (n - 1) / n times the bytes over the time.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

SECONDS = 1.0
"""For each size."""


def main(words: list[str]) -> int:
    rank, world, address, port, backend, sizes = int(words[0]), int(words[1]), words[2], words[3], words[4], words[5]
    device = torch.device("cuda", rank % torch.cuda.device_count()) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"tcp://{address}:{port}", rank=rank, world_size=world, timeout=timedelta(seconds=120)
    )
    found = {size: _bus_bandwidth(int(size), world, device) for size in sizes.split(",")}
    dist.destroy_process_group()
    print(json.dumps(found))
    return 0


def _bus_bandwidth(num_bytes: int, world: int, device: torch.device) -> float:
    """Bytes per second."""
    data = torch.zeros(num_bytes // 4, device=device)
    one = _time(data, 1, device)
    repeats = max(1, min(200, int(SECONDS / max(_agreed(one, device), 1e-6) / 4)))
    seconds = _agreed(_time(data, repeats, device) / repeats, device)
    return 2 * (world - 1) / world * num_bytes / seconds


def _time(data: torch.Tensor, repeats: int, device: torch.device) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(data)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _agreed(seconds: float, device: torch.device) -> float:
    """All ranks repeat alike: the slowest decides."""
    value = torch.tensor([seconds], device=device, dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value.item())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
