"""Slices of a checkpoint read one ahead: while one is being put in its place, the next comes from the disk."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import count
from typing import Any, TypeVar

Result = TypeVar("Result")

SLICE_BYTES = 2**20
"""Of a matrix in fp32. Two are held at a time with what decoding them takes: at most 32 MiB, which a test measures."""
SLICES_BETWEEN_TRIMS = 4


def ahead(jobs: Iterable[Callable[[], Result]]) -> Iterator[Result]:
    """What the jobs give, in order; each runs in a thread of its own while the one before it is used."""
    waiting = list(jobs)
    if len(waiting) == 1:
        yield waiting[0]()
        _trim()
        return
    with ThreadPoolExecutor(1, thread_name_prefix="weights") as pool:
        coming = pool.submit(waiting[0]) if waiting else None
        for job in [*waiting[1:], None]:
            assert coming is not None
            result = coming.result()
            coming = pool.submit(job) if job is not None else None
            yield result
            del result
            _trim()


def give_back_memory() -> None:
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
        give_back_memory()


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
