"""Slices of a checkpoint read one ahead: while one is being put in its place, the next comes from the disk."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count
from typing import Any, TypeVar

Result = TypeVar("Result")

SLICE_BYTES = 2**20
"""Of a matrix in fp32. Two are held at a time with what decoding them takes: at most 32 MiB, which a test measures."""
DEVICE_SLICE_BYTES = 2**26
"""The same on the way to another device: few large copies rather than many small ones, and several of them read at a time."""
DEVICE_WORKERS = 8
SLICES_BETWEEN_TRIMS = 4


def prefetch(jobs: Iterable[Callable[[], Result]], workers: int = 1) -> Iterator[Result]:
    """What the jobs give, in order; each runs in another thread while those before it are used, `workers` of them at a time."""
    waiting = list(jobs)
    if len(waiting) == 1:
        yield waiting[0]()
        _trim()
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="weights") as pool:
        coming = deque(pool.submit(job) for job in waiting[:workers])
        for job in [*waiting[workers:], *[None] * len(coming)]:
            result = coming.popleft().result()
            if job is not None:
                coming.append(pool.submit(job))
            yield result
            del result
            if workers == 1:  # what goes to another device is gone again before it adds up
                _trim()


def trim_heap() -> None:
    """Gives memory that was freed back to the system: after a model has been let go, and now and then while one is loaded.

    glibc's heap does not find the room of an aligned block again that was freed (it looks for a larger one), so a heap that sees
    slice after slice of the same size grows as if nothing were freed: by as much as the matrix that is loaded.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


_slices = count(1)


def _trim() -> None:
    if next(_slices) % SLICES_BETWEEN_TRIMS == 0:
        trim_heap()


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
