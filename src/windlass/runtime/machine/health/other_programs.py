"""How much of this machine's CPUs other programs use while something is measured."""

from __future__ import annotations

import os
import resource
import time

from windlass.runtime.machine.proc import read_text

BUSY = (0, 1, 2, 5, 6)
"""Of /proc/stat: user, nice, system, interrupts (proc(5))."""


class OtherPrograms:
    """Since it was made. This process and those of its children that have ended are not counted."""

    def __init__(self) -> None:
        self._began, self._busy, self._own = time.monotonic(), busy_seconds(read_text("/proc/stat")), own_seconds()

    def cores(self) -> float:
        busy = busy_seconds(read_text("/proc/stat")) - self._busy
        others = busy - (own_seconds() - self._own)
        return max(others, 0.0) / max(time.monotonic() - self._began, 1e-9)

    def share(self) -> float:
        """Of all CPUs."""
        return min(self.cores() / (os.cpu_count() or 1), 1.0)


def busy_seconds(stat: str) -> float:
    ticks = [int(word) for word in stat.partition("\n")[0].split()[1:]]
    return sum(ticks[place] for place in BUSY if place < len(ticks)) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime + time.process_time()
