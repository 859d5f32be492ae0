"""Energy counters of this machine: processors by RAPL (kernel.org, power/powercap/powercap), NVIDIA GPUs by NVML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from windlass.runtime.machine.gpus import DRIVER_FILES
from windlass.runtime.machine.proc import ReadText, read_text

RAPL = "/sys/class/powercap"


def counter_delta(before: int, after: int, highest: int) -> int:
    """Growth of a counter that wraps around at `highest`."""
    return after - before if after >= before else after + highest - before


class RaplMonitor:
    """Energy of the CPU packages, from RAPL counters; on most machines only root can read them."""

    def __init__(self, read: ReadText = read_text, folder: str = RAPL) -> None:
        self._read = read
        names = sorted(path.name for path in Path(folder).glob("intel-rapl:?")) if Path(folder).is_dir() else []
        self._folders = [f"{folder}/{name}" for name in names]
        self._last = [self._counter(path) for path in self._folders]
        self._joules = 0.0

    @property
    def is_readable(self) -> bool:
        return bool(self._last) and all(value is not None for value in self._last)

    def _counter(self, folder: str) -> int | None:
        text = self._read(f"{folder}/energy_uj").strip()
        return int(text) if text.isdecimal() else None

    def joules(self) -> float | None:
        if not self.is_readable:
            return None
        for index, folder in enumerate(self._folders):
            now, before = self._counter(folder), self._last[index]
            if now is not None and before is not None:
                highest = self._read(f"{folder}/max_energy_range_uj").strip()
                self._joules += counter_delta(before, now, int(highest) if highest.isdecimal() else 0) / 1e6
                self._last[index] = now
        return self._joules


class EnergyCounters:
    """All counters together, since it was made. `nvml`: the library, or a stand-in; None: that of this machine."""

    def __init__(self, rapl: RaplMonitor | None = None, nvml: Any | None = None) -> None:
        self._rapl = rapl or RaplMonitor()
        self._nvml = nvml if nvml is not None else _load_nvml()
        self._first = self._gpu_joules()

    def _gpu_joules(self) -> float | None:
        if self._nvml is None:
            return None
        try:
            handles = [self._nvml.nvmlDeviceGetHandleByIndex(index) for index in range(self._nvml.nvmlDeviceGetCount())]
            return sum(self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) for handle in handles) / 1000 if handles else None
        except Exception:  # noqa: BLE001 - NVML has exceptions of its own; GPUs before Volta count nothing
            return None

    @property
    def source(self) -> str:
        found = [name for name, value in (("nvml", self._first), ("rapl", self._rapl.joules())) if value is not None]
        return "+".join(found) or "none"

    def joules(self) -> float | None:
        now, processors = self._gpu_joules(), self._rapl.joules()
        gpus = None if now is None or self._first is None else now - self._first
        return None if gpus is None and processors is None else (gpus or 0.0) + (processors or 0.0)


def _load_nvml() -> Any | None:
    if not any(Path(path).exists() for path in DRIVER_FILES):
        return None
    try:
        import pynvml

        nvml: Any = pynvml
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 - NVML has exceptions of its own
        return None
    return nvml
