"""Bytes and seconds of a group's collectives, for groups that do not count natively."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from windlass.runtime.parallel.group import Count


class CollectiveCounters:
    def __init__(self) -> None:
        self._counts: dict[str, Count] = {}

    @contextmanager
    def counted(self, name: str, sent_bytes: int, received_bytes: int) -> Iterator[None]:
        began = time.perf_counter()
        yield
        before, seconds = self._counts.get(name, Count()), time.perf_counter() - began
        self._counts[name] = Count(
            before.calls + 1, before.sent_bytes + sent_bytes, before.received_bytes + received_bytes, before.seconds + seconds
        )

    def all(self) -> dict[str, Count]:
        return dict(self._counts)
