"""One process a machine that samples: GPUs every second, the host when it is asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from windlass.core.hardware.energy import Grid
from windlass.core.hardware.hourly import HourlyGrid
from windlass.core.metrics import node as m
from windlass.runtime.machine.energy import RaplMonitor
from windlass.tasks.observe.node.amd import AmdGpus, load_amd
from windlass.tasks.observe.node.host import add_host
from windlass.tasks.observe.node.nvidia import NvidiaGpus, load_nvml
from windlass.tasks.observe.node.readings import Readings

SAMPLE_SECONDS = 1.0


class Gpus(Protocol):
    num_errors: int

    def __len__(self) -> int: ...
    def sample(self, seconds: float) -> None: ...
    def add_to(self, found: Readings) -> None: ...
    def joules(self) -> float | None: ...


def this_machines_gpus() -> list[Gpus]:
    nvml, amd = load_nvml(), load_amd()
    return [*([NvidiaGpus(nvml)] if nvml is not None else []), *([AmdGpus(amd)] if amd is not None else [])]


class NodeExporter:
    """`gpus` None: those of this machine. `with_host` False: node_exporter runs here and has the host's numbers."""

    def __init__(
        self,
        gpus: Sequence[Gpus] | None = None,
        *,
        with_host: bool = True,
        grid: Grid | None = None,
        hourly: HourlyGrid | None = None,
        budget_watts: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        rapl: RaplMonitor | None = None,
    ) -> None:
        self.gpus: Sequence[Gpus] = this_machines_gpus() if gpus is None else gpus
        self._hourly = hourly
        self._with_host, self._grid, self._budget_watts, self._clock = with_host, grid, budget_watts, clock
        self._rapl = rapl or RaplMonitor()
        self._sampled_at = clock()
        self._lock = threading.Lock()

    def sample(self) -> None:
        with self._lock:
            now = self._clock()
            for gpus in self.gpus:
                gpus.sample(now - self._sampled_at)
            self._sampled_at = now

    def text(self) -> str:
        with self._lock:
            return self._readings().text()

    def joules(self) -> dict[str, float]:
        """By counter, since it began to count; without those that cannot be read."""
        found = {
            "rapl": self._rapl.joules(),
            **{("nvml" if isinstance(one, NvidiaGpus) else "amdsmi"): one.joules() for one in self.gpus},
        }
        return {source: value for source, value in found.items() if value is not None}

    def _readings(self) -> Readings:
        found = Readings()
        for gpus in self.gpus:
            gpus.add_to(found)
        if self._with_host:
            add_host(found)
        for source, joules in self.joules().items():
            found.add(m.NODE_ENERGY, joules, {"source": source})
        self._add_intensity(found)
        found.add(m.ENERGY_BUDGET, self._budget_watts)
        found.add(m.EXPORTER_SECONDS, time.process_time())
        found.add(m.EXPORTER_ERRORS, sum(one.num_errors for one in self.gpus), {"source": "gpu"})
        return found

    def _add_intensity(self, found: Readings) -> None:
        """This hour's; an hour that the file does not have is shown by no number."""
        if self._hourly is not None:
            now = self._hourly.at(time.time())
            if now is not None:
                found.add(m.GRID_INTENSITY, now, {"region": self._hourly.name})
        elif self._grid is not None:
            found.add(m.GRID_INTENSITY, self._grid.grams_per_kwh, {"region": self._grid.name})

    def run(self, stop: threading.Event, seconds: float = SAMPLE_SECONDS) -> None:
        """Samples until told to stop."""
        while True:
            self.sample()
            if stop.wait(seconds):
                return
