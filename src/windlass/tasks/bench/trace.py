"""Chrome trace of a run, for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import msgspec

PYTHON, KERNELS = 1, 2
"""Threads in the trace."""
_NAMES = {PYTHON: "engine (Python)", KERNELS: "native kernels"}


class Trace:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._begin = clock, clock()
        self._events: list[dict[str, Any]] = [
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": row, "args": {"name": name}} for row, name in _NAMES.items()
        ]

    @contextmanager
    def span(self, name: str, row: int = PYTHON, **details: object) -> Generator[None]:
        begin = self._clock()
        try:
            yield
        finally:
            self.add(name, begin, self._clock() - begin, row, **details)

    def add(self, name: str, begin: float, seconds: float, row: int = PYTHON, **details: object) -> None:
        """`begin`: by the trace's clock."""
        event = {"name": name, "ph": "X", "pid": 1, "tid": row, "ts": (begin - self._begin) * 1e6, "dur": seconds * 1e6}
        self._events.append(event | ({"args": details} if details else {}))

    def add_chain(self, parts: Iterable[tuple[str, float]], begin: float, row: int = KERNELS) -> None:
        """Consecutive operations of known order and duration."""
        for name, seconds in parts:
            self.add(name, begin, seconds, row)
            begin += seconds

    def encode(self) -> bytes:
        return msgspec.json.encode({"traceEvents": self._events, "displayTimeUnit": "ms"})
