"""Memory of this process, now and over time."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from windlass.core.model import Frozen
from windlass.errors import MissingExtra
from windlass.units import MIB

SAMPLE_SECONDS = 0.02


class Resident(Frozen):
    own_bytes: int
    """Anonymous and shared memory."""
    mapped_bytes: int
    """Resident pages of mapped files, which the system can reclaim."""


class MemorySample(Frozen):
    seconds: float
    own_bytes: int
    mapped_bytes: int


def resident(status: str | None = None) -> Resident:
    """From /proc/self/status (or a text in its format); without /proc, the peak so far."""
    if status is None:
        try:
            status = Path("/proc/self/status").read_text()
        except OSError:
            return Resident(own_bytes=_peak_bytes(), mapped_bytes=0)
    return Resident(own_bytes=_field(status, "RssAnon") + _field(status, "RssShmem"), mapped_bytes=_field(status, "RssFile"))


def _field(status: str, name: str) -> int:
    match = re.search(rf"^{name}:\s*(\d+) kB", status, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def _peak_bytes() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class MemoryLog:
    """Samples memory every few milliseconds in a thread, with marks for the phases of a run."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._begin = clock, clock()
        self.samples: list[MemorySample] = []
        self.marks: list[tuple[float, str]] = []
        self.base_bytes = 0
        """Memory before loading; the planned bytes come on top."""

    def mark(self, name: str) -> None:
        self.marks.append((self._clock() - self._begin, name))

    def sample(self) -> None:
        found = resident()
        seconds = self._clock() - self._begin
        self.samples.append(MemorySample(seconds=seconds, own_bytes=found.own_bytes, mapped_bytes=found.mapped_bytes))

    @property
    def peak_bytes(self) -> int:
        return max((one.own_bytes for one in self.samples), default=0)

    @contextmanager
    def watching(self) -> Generator[None]:
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(SAMPLE_SECONDS):
                self.sample()

        self.sample()
        watcher = threading.Thread(target=watch, name="memory", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
            self.sample()


def draw(log: MemoryLog, planned_bytes: int | None, title: str, path: Path) -> None:
    """Plots memory over time, the planned memory, and the phases of the run."""
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise MissingExtra("matplotlib", "plot", "plotting memory") from None
    seconds = [one.seconds for one in log.samples]
    own = [one.own_bytes / MIB for one in log.samples]
    drawn: Any = pyplot.subplots(figsize=(9, 4.5))
    figure, axes = drawn
    axes.fill_between(seconds, own, alpha=0.5, label="process memory")
    axes.plot(
        seconds,
        [total + one.mapped_bytes / MIB for total, one in zip(own, log.samples, strict=True)],
        lw=0.8,
        label="with mapped files",
    )
    if planned_bytes:
        axes.axhline((log.base_bytes + planned_bytes) / MIB, ls="--", color="tab:red", label="planned")
    for at, name in log.marks:
        axes.axvline(at, lw=0.5, color="grey")
        axes.text(at, axes.get_ylim()[1], f" {name}", rotation=90, va="top", fontsize=7)
    axes.set(xlabel="seconds", ylabel="MiB", title=title, ylim=(0, None))
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
