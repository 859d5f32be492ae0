"""Resource usage of this machine: CPU, memory, GPUs, energy. Read on demand, at most once a second."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from windlass.core.model import Frozen
from windlass.runtime.machine.energy import RaplMonitor
from windlass.runtime.machine.gpus import DRIVER_FILES
from windlass.runtime.machine.memory import SystemMemory, system_memory, tree_resident_bytes
from windlass.runtime.machine.proc import ReadText, read_text

FRESH_SECONDS = 0.9


class DeviceUsage(Frozen):
    name: str
    use_percent: float | None
    memory_bytes: int
    memory_total_bytes: int
    planned_bytes: int | None = None
    power_watts: float | None = None


class ResourceUsage(Frozen):
    cpu_percent: float | None
    memory_bytes: int
    memory_total_bytes: int
    process_bytes: int
    devices: tuple[DeviceUsage, ...] = ()
    energy_joules: float | None = None
    """Since the server started; None without a readable counter."""
    energy_source: str = "none"


# --- pure ------------------------------------------------------------------------------------------------------------


def cpu_times(stat: str) -> tuple[int, int]:
    """/proc/stat -> (busy, all) in ticks since boot."""
    words = stat.partition("\n")[0].split()
    if len(words) < 6 or words[0] != "cpu":
        return 0, 0
    ticks = [int(word) for word in words[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # idle and iowait


def busy_percent(before: tuple[int, int], after: tuple[int, int]) -> float | None:
    total = after[1] - before[1]
    return None if total <= 0 else 100.0 * (after[0] - before[0]) / total


# --- reading ---------------------------------------------------------------------------------------------------------


class NvmlMonitor:
    """GPU usage through NVML, which is kept open. Empty without a driver or without pynvml."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._handles: list[Any] = []
        if any(Path(path).exists() for path in DRIVER_FILES):
            self._open()
        self._first = self._energy()

    def _open(self) -> None:
        try:
            import pynvml

            nvml: Any = pynvml
            nvml.nvmlInit()
            self._handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            self._nvml = nvml
        except Exception:  # noqa: BLE001 - statistics must not fail the server; NVML has its own exception classes
            self._nvml, self._handles = None, []

    def _ask(self, name: str, handle: Any) -> Any:
        with suppress(Exception):
            return getattr(self._nvml, name)(handle)
        return None

    def _energy(self) -> float | None:
        counters = [self._ask("nvmlDeviceGetTotalEnergyConsumption", handle) for handle in self._handles]
        return sum(counters) / 1000 if counters and None not in counters else None

    def joules(self) -> float | None:
        now = self._energy()
        return None if now is None or self._first is None else now - self._first

    def now(self) -> list[DeviceUsage]:
        return [self._device(handle) for handle in self._handles]

    def _device(self, handle: Any) -> DeviceUsage:
        memory, use = self._ask("nvmlDeviceGetMemoryInfo", handle), self._ask("nvmlDeviceGetUtilizationRates", handle)
        watts = self._ask("nvmlDeviceGetPowerUsage", handle)
        return DeviceUsage(
            name=str(self._ask("nvmlDeviceGetName", handle) or "GPU"),
            use_percent=None if use is None else float(use.gpu),
            memory_bytes=0 if memory is None else int(memory.used),
            memory_total_bytes=0 if memory is None else int(memory.total),
            power_watts=None if watts is None else watts / 1000,
        )


class ResourceMonitor:
    """`planned_bytes`: planned memory per device, in the order of the devices."""

    def __init__(self, planned_bytes: tuple[int, ...] = (), read: ReadText = read_text) -> None:
        self._read, self._planned = read, planned_bytes
        self._rapl, self._gpus = RaplMonitor(read), NvmlMonitor()
        self._cpu = cpu_times(read("/proc/stat"))
        self._seen = -FRESH_SECONDS
        self._latest: ResourceUsage | None = None

    def now(self) -> ResourceUsage:
        """Blocks for about a millisecond."""
        if self._latest is None or time.monotonic() - self._seen > FRESH_SECONDS:
            self._seen, self._latest = time.monotonic(), self._read_usage()
        return self._latest

    def _read_usage(self) -> ResourceUsage:
        before, self._cpu = self._cpu, cpu_times(self._read("/proc/stat"))
        memory = system_memory(self._read)
        joules, source = self._energy()
        return ResourceUsage(
            cpu_percent=busy_percent(before, self._cpu),
            memory_bytes=memory.used_bytes,
            memory_total_bytes=memory.total_bytes,
            process_bytes=tree_resident_bytes(os.getpid(), self._read),
            devices=self._devices(memory),
            energy_joules=joules,
            energy_source=source,
        )

    def _devices(self, memory: SystemMemory) -> tuple[DeviceUsage, ...]:
        found = self._gpus.now() or [
            DeviceUsage(name="CPU", use_percent=None, memory_bytes=memory.used_bytes, memory_total_bytes=memory.total_bytes)
        ]
        return tuple(_planned(device, index, self._planned) for index, device in enumerate(found))

    def joules(self) -> float | None:
        """Since the start, read now; None without a counter."""
        return self._energy()[0]

    def _energy(self) -> tuple[float | None, str]:
        gpu, cpu = self._gpus.joules(), self._rapl.joules()
        if gpu is None and cpu is None:
            return None, "none"
        source = " + ".join(name for name, value in (("NVML counter", gpu), ("RAPL counter", cpu)) if value is not None)
        return (gpu or 0.0) + (cpu or 0.0), source


def _planned(device: DeviceUsage, index: int, planned: tuple[int, ...]) -> DeviceUsage:
    return msgspec.structs.replace(device, planned_bytes=planned[index]) if index < len(planned) else device
