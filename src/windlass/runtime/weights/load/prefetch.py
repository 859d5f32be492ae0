"""Reads slices of a checkpoint ahead in a thread, while the one before is being processed."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, TypeVar

Result = TypeVar("Result")

SLICE_BYTES = 2**20
"""Slice size, as fp32. Two are held at a time; with decoding at most 32 MiB, which a test measures."""
DEVICE_SLICE_BYTES = 2**26
"""Slice size for other devices: few large copies, several read in parallel."""
DEVICE_WORKERS = 8


def prefetch(jobs: Iterable[Callable[[], Result]], workers: int = 1) -> Iterator[Result]:
    """Results of the jobs in order; up to `workers` jobs run in threads while earlier results are used."""
    waiting = list(jobs)
    if len(waiting) == 1:
        yield waiting[0]()
        trim_heap()
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="weights") as pool:
        coming = deque(pool.submit(job) for job in waiting[:workers])
        for job in [*waiting[workers:], *[None] * len(coming)]:
            result = coming.popleft().result()
            if job is not None:
                coming.append(pool.submit(job))
            yield result
            del result
            if workers == 1:  # copies to another device are freed before they add up
                trim_heap()


def trim_heap() -> None:
    """malloc_trim: returns freed memory to the system, after unloading a model and after each slice while loading one.

    glibc does not reuse a freed aligned block for an allocation of the same size (it looks for a larger one), so a heap that
    allocates slice after slice grows by as much as the matrix being loaded.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
