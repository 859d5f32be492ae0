"""Ranks that are processes, forked from a server that has imported everything already: importing torch takes longer than any of these tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from waiting import HUNG_SECONDS

CONTEXT: Any = multiprocessing.get_context("forkserver")
PRELOADED = [
    "torch",
    "torch.distributed",
    "windlass.runtime.parallel.join",
    "windlass.runtime.kernels.cpu.links",
    "windlass.runtime.nn",
    "windlass.runtime.weights",
]
CONTEXT.set_forkserver_preload(PRELOADED)


@contextmanager
def started(count: int, work: Callable[..., None], *given: Any) -> Iterator[list[Any]]:
    """work(rank, *given) of every rank in a process of its own; none is left behind."""
    ranks = [CONTEXT.Process(target=work, args=(rank, *given), daemon=True) for rank in range(count)]
    for process in ranks:
        process.start()
    try:
        yield ranks
    finally:
        for process in ranks:
            process.kill()
            process.join()


def exit_codes(count: int, work: Callable[..., None], *given: Any) -> list[int | None]:
    """None: it hung."""
    with started(count, work, *given) as ranks:
        for process in ranks:
            process.join(HUNG_SECONDS)
        return [process.exitcode for process in ranks]
