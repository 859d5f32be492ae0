"""A rank that is killed while another waits for it, as a test starts it."""

from __future__ import annotations

LOST = 7


def run_rank(rank: int, world: int, folder: str) -> None:
    """Rank 1 is killed; the others leave FOLDER/said and end with LOST."""
    import os
    import signal
    import sys
    from pathlib import Path

    import torch
    import torch.distributed as dist

    from windlass.tasks.train.loop.lost import RankLost, plain_errors

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        with plain_errors("checkpoints"):
            while True:
                dist.all_reduce(torch.ones(10))
    except RankLost as error:
        (Path(folder) / "said").write_text(str(error))
        sys.exit(LOST)
