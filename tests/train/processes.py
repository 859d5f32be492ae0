"""Ranks of a training run as processes, forked from a server that has imported torch already."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

CONTEXT: Any = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.fsdp", "windlass.train.build"])


def exit_codes(count: int, work: Callable[..., None], *given: Any, seconds: float = 300) -> list[int | None]:
    """Of work(rank, count, *given) in a process a rank; none is left behind."""
    ranks = [CONTEXT.Process(target=work, args=(rank, count, *given), daemon=True) for rank in range(count)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(seconds)
        return [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.join()
