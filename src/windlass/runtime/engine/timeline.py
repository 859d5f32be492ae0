"""When each part of a start was over, for whoever looks for what takes long: lines in the file that WINDLASS_TIMELINE names, of all processes.

A line: seconds since 1970, process number, peak resident bytes, what. Nothing is written where the variable is not set.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from typing import NamedTuple

VARIABLE = "WINDLASS_TIMELINE"
RSS_UNIT = 1 if sys.platform == "darwin" else 1024


class Mark(NamedTuple):
    seconds: float
    """Since 1970."""
    process: int
    peak_bytes: int
    what: str


def mark(what: str, monotonic: float | None = None) -> None:
    """`monotonic`: when it was, by time.monotonic(); now if it is not given."""
    path = os.environ.get(VARIABLE)
    if not path:
        return
    seconds = time.time() + (0.0 if monotonic is None else monotonic - time.monotonic())
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT
    with open(path, "a") as file:  # noqa: PTH123 - as cheap as can be
        file.write(f"{seconds:.6f} {os.getpid()} {peak_bytes} {what}\n")


def parse(text: str) -> list[Mark]:
    """In the order of time."""
    rows = (line.split(" ", 3) for line in text.splitlines())
    return sorted(Mark(float(seconds), int(process), int(peak), what) for seconds, process, peak, what in rows)
