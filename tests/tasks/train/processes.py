"""Ranks of a training run as processes, forked from a server that has imported torch already."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from waiting import HUNG_SECONDS

CONTEXT: Any = multiprocessing.get_context("forkserver")
# One server for all tests of a process, whoever asks first; torch._dynamo is what distributed tensors import when they are first used.
PRELOADED = ["torch", "torch.distributed", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.checkpoint"]
PRELOADED += [
    "torch._dynamo",
    "windlass.tasks.train.build",
    "windlass.tasks.train.checkpoint",
    "windlass.runtime.parallel.join",
    "windlass.runtime.kernels.cpu.links",
]
CONTEXT.set_forkserver_preload(PRELOADED)


def exit_codes(count: int, work: Callable[..., None], *given: Any) -> list[int | None]:
    """Of work(rank, count, *given) in a process a rank, None where it hung; none is left behind."""
    ranks = [CONTEXT.Process(target=work, args=(rank, count, *given), daemon=True) for rank in range(count)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(HUNG_SECONDS)
        return [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.join()
