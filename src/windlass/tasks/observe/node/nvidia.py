"""NVIDIA GPUs through NVML, under DCGM's field names and units. Knows the library by its functions, so a stand-in may take its place.

What a GPU does not support is asked once and then left out: failing calls are slow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windlass.core.metrics import node as m
from windlass.core.metrics.metric import Metric
from windlass.runtime.machine.gpus import DRIVER_FILES
from windlass.tasks.observe.node.readings import Readings
from windlass.units import MIB

REASONS = {0x4: "sw_power_cap", 0x8: "hw_slowdown", 0x20: "sw_thermal", 0x40: "hw_thermal", 0x80: "hw_power_brake"}
"""Bits of the reasons for lower clocks (nvml.h, nvmlClocksEventReason*); idling and set clocks are no throttling."""
XID_EVENT = 0x8
"""nvmlEventTypeXidCriticalError."""
MEMORY_TEMP_FIELD, NVLINK_TX_FIELD, NVLINK_RX_FIELD = 82, 138, 139
"""NVML_FI_DEV_MEMORY_TEMP, NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX and _RX (KiB)."""
SM, MEMORY = 1, 2
"""nvmlClockType_t."""
CORRECTED, UNCORRECTED, VOLATILE = 0, 1, 0

Read = Callable[[Any, Any], float | None]


def _field(nvml: Any, handle: Any, number: int) -> float | None:
    (found,) = nvml.nvmlDeviceGetFieldValues(handle, [number])
    return float(found.value.ullVal) if found.nvmlReturn == 0 else None


def _nvlink_bytes(nvml: Any, handle: Any) -> float | None:
    sent, received = _field(nvml, handle, NVLINK_TX_FIELD), _field(nvml, handle, NVLINK_RX_FIELD)
    return None if sent is None or received is None else 1024 * (sent + received)


def _reasons(nvml: Any, handle: Any) -> float:
    """The function was renamed with driver 535."""
    read = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None) or nvml.nvmlDeviceGetCurrentClocksThrottleReasons
    return read(handle)


QUICK: tuple[tuple[Metric, Read], ...] = (
    (m.GPU_UTIL, lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
    (m.MEM_COPY_UTIL, lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).memory),
    (m.FB_USED, lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used // MIB),
    (m.FB_FREE, lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).free // MIB),
    (m.GPU_TEMP, lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, 0)),
    (m.MEMORY_TEMP, lambda nvml, gpu: _field(nvml, gpu, MEMORY_TEMP_FIELD)),
    (m.POWER_USAGE, lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
    (m.ENERGY, lambda nvml, gpu: nvml.nvmlDeviceGetTotalEnergyConsumption(gpu)),
    (m.SM_CLOCK, lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, SM)),
    (m.MEM_CLOCK, lambda nvml, gpu: nvml.nvmlDeviceGetClockInfo(gpu, MEMORY)),
    (m.THROTTLE_REASONS, _reasons),
)
"""Read with every sample."""
SLOW: tuple[tuple[Metric, Read], ...] = (
    (m.ECC_CORRECTED, lambda nvml, gpu: nvml.nvmlDeviceGetTotalEccErrors(gpu, CORRECTED, VOLATILE)),
    (m.ECC_UNCORRECTED, lambda nvml, gpu: nvml.nvmlDeviceGetTotalEccErrors(gpu, UNCORRECTED, VOLATILE)),
    (m.ROW_REMAP_FAILURE, lambda nvml, gpu: float(bool(nvml.nvmlDeviceGetRemappedRows(gpu)[3]))),
    (m.NVLINK_BYTES, _nvlink_bytes),
    (m.PCIE_TX, lambda nvml, gpu: nvml.nvmlDeviceGetPcieThroughput(gpu, 0)),
    (m.PCIE_RX, lambda nvml, gpu: nvml.nvmlDeviceGetPcieThroughput(gpu, 1)),
    (m.PCIE_REPLAYS, lambda nvml, gpu: nvml.nvmlDeviceGetPcieReplayCounter(gpu)),
)
"""Read with every tenth: they change rarely, and PCIe throughput is measured over 20 ms while we wait."""
SLOW_EVERY = 10


def load_nvml() -> Any | None:
    """None without a driver or without nvidia-ml-py."""
    if not any(Path(path).exists() for path in DRIVER_FILES):
        return None
    try:
        import pynvml

        nvml: Any = pynvml
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 - NVML has exceptions of its own
        return None
    return nvml


class _Gpu:
    def __init__(self, index: int, handle: Any, name: str, uuid: str, limit_watts: float | None) -> None:
        self.handle, self.labels, self.limit_watts = handle, {"gpu": str(index), "UUID": uuid, "modelName": name}, limit_watts
        self.unsupported: set[str] = set()
        self.values: dict[str, float] = {}
        self.failures: Counter[str] = Counter()


class NvidiaGpus:
    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._gpus = [self._open(index) for index in range(nvml.nvmlDeviceGetCount())]
        self._events = self._watch_xids()
        self._num_samples = 0
        self.num_errors = 0
        self._xids: Counter[tuple[str, str]] = Counter()
        self._last_xid: dict[str, int] = {}
        self._throttled: Counter[tuple[str, str]] = Counter()
        self._throttled_seconds: dict[tuple[str, str], float] = {}

    def __len__(self) -> int:
        return len(self._gpus)

    def _open(self, index: int) -> _Gpu:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        return _Gpu(
            index, handle, _text(nvml.nvmlDeviceGetName(handle)), _text(nvml.nvmlDeviceGetUUID(handle)), self._limit(handle)
        )

    def _limit(self, handle: Any) -> float | None:
        try:
            return self._nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
        except Exception:  # noqa: BLE001 - NVML has exceptions of its own
            return None

    def _watch_xids(self) -> Any | None:
        try:
            events = self._nvml.nvmlEventSetCreate()
            for gpu in self._gpus:
                self._nvml.nvmlDeviceRegisterEvents(gpu.handle, XID_EVENT, events)
        except Exception:  # noqa: BLE001 - not supported everywhere (WSL, vGPU)
            return None
        return events

    # --- sampling

    def sample(self, seconds: float) -> None:
        """`seconds`: since the last sample."""
        for gpu in self._gpus:
            self._read(gpu, QUICK)
            if self._num_samples % SLOW_EVERY == 0:
                self._read(gpu, SLOW)
            self._count_throttling(gpu, seconds)
        self._num_samples += 1
        self._take_xids()

    def _read(self, gpu: _Gpu, table: tuple[tuple[Metric, Read], ...]) -> None:
        for metric, read in table:
            if metric.name in gpu.unsupported:
                continue
            try:
                value = read(self._nvml, gpu.handle)
            except Exception as error:  # noqa: BLE001 - NVML has exceptions of its own
                self._failed(gpu, metric.name, error)
                continue
            if value is None:
                gpu.unsupported.add(metric.name)
            else:
                gpu.values[metric.name] = float(value)

    def _failed(self, gpu: _Gpu, name: str, error: Exception) -> None:
        gpu.values.pop(name, None)
        if "NotSupported" in type(error).__name__ or isinstance(error, AttributeError):
            gpu.unsupported.add(name)
        else:
            self.num_errors += 1

    def _count_throttling(self, gpu: _Gpu, seconds: float) -> None:
        bits = int(gpu.values.get(m.THROTTLE_REASONS.name, 0))
        for bit, reason in REASONS.items():
            key = (gpu.labels["gpu"], reason)
            self._throttled_seconds[key] = self._throttled_seconds.get(key, 0.0) + (seconds if bits & bit else 0.0)

    def _take_xids(self) -> None:
        while self._events is not None:
            try:
                event = self._nvml.nvmlEventSetWait_v2(self._events, 0)
            except Exception:  # noqa: BLE001 - a timeout: there is none
                return
            if event.eventType == XID_EVENT:
                gpu = self._index_of(event.device)
                self._xids[gpu, str(event.eventData)] += 1
                self._last_xid[gpu] = int(event.eventData)

    def _index_of(self, handle: Any) -> str:
        try:
            return str(self._nvml.nvmlDeviceGetIndex(handle))
        except Exception:  # noqa: BLE001 - a GPU that has fallen off the bus answers nothing
            return "unknown"

    # --- what was sampled

    def add_to(self, found: Readings) -> None:
        for metric, _ in (*QUICK, *SLOW):
            for gpu in self._gpus:
                found.add(metric, gpu.values.get(metric.name), gpu.labels)
        for gpu in self._gpus:
            found.add(m.XID_LAST, self._last_xid.get(gpu.labels["gpu"], 0), gpu.labels)
            found.add(m.GPU_POWER_LIMIT, gpu.limit_watts, {"gpu": gpu.labels["gpu"]})
        for (gpu_index, xid), count in self._xids.items():
            found.add(m.XIDS, count, {"gpu": gpu_index, "xid": xid})
        for (gpu_index, reason), seconds in self._throttled_seconds.items():
            found.add(m.THROTTLED, seconds, {"gpu": gpu_index, "reason": reason})

    def joules(self) -> float | None:
        """Of all GPUs, since their drivers were loaded, as of the last sample."""
        found = [gpu.values.get(m.ENERGY.name) for gpu in self._gpus]
        known = [value for value in found if value is not None]
        return sum(known) / 1000 if known and len(known) == len(found) else None


def _text(value: str | bytes) -> str:
    """Bytes before nvidia-ml-py 12."""
    return value.decode() if isinstance(value, bytes) else value
