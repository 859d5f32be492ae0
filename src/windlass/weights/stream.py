"""Slices of a checkpoint read one ahead: while one is being put in its place, the next comes from the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

SLICE_BYTES = 4 * 2**20
"""Of a matrix in fp32. Two are held at a time with what decoding them takes: at most 32 MiB, which a test measures."""


def ahead(jobs: Iterable[Callable[[], Result]]) -> Iterator[Result]:
    """What the jobs give, in order; each runs in a thread of its own while the one before it is used."""
    waiting = list(jobs)
    if len(waiting) == 1:
        yield waiting[0]()
        return
    with ThreadPoolExecutor(1, thread_name_prefix="weights") as pool:
        coming = pool.submit(waiting[0]) if waiting else None
        for job in [*waiting[1:], None]:
            assert coming is not None
            result = coming.result()
            coming = pool.submit(job) if job is not None else None
            yield result
            del result
