"""A rank that computes as long as it is told between collectives, and what the clocks of all say, as a test starts it."""

from __future__ import annotations


def run_rank(rank: int, world: int, folder: str, slow: int) -> None:
    """Leaves FOLDER/times.json, written by rank 0."""
    import time
    from pathlib import Path

    import msgspec
    import torch
    import torch.distributed as dist

    from windlass.tasks.train.parallel.rank_clock import EVERY_STEPS, RankClock

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    clock, numbers = RankClock(), torch.ones(10)
    dist.barrier()
    for step in range(1, EVERY_STEPS + 1):
        began = time.perf_counter()
        time.sleep(0.05 if rank == slow else 0.001)
        with clock.part("gradients"):
            dist.all_reduce(numbers)
        found = clock.end_step(time.perf_counter() - began)
        assert bool(found) == (step == EVERY_STEPS)
    if rank == 0:
        (Path(folder) / "times.json").write_bytes(msgspec.json.encode(found))
    dist.barrier()
    dist.destroy_process_group()
