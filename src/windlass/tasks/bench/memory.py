"""Memory of this process, now and over time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from windlass.core.model import Frozen
from windlass.errors import MissingExtra
from windlass.runtime.machine.memory import process_memory
from windlass.units import MIB

SAMPLE_SECONDS = 0.02


class MemorySample(Frozen):
    seconds: float
    own_bytes: int
    mapped_bytes: int


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
        found = process_memory()
        seconds = self._clock() - self._begin
        self.samples.append(MemorySample(seconds=seconds, own_bytes=found.anonymous_bytes, mapped_bytes=found.file_bytes))

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
