"""A stand-in for NVML: GPUs that work, heat up and count energy by a clock, and fail when told. For trying out dashboards and alerts."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace as Values
from typing import Any

from windlass.tasks.observe.node.nvidia import MEMORY_TEMP_FIELD, NVLINK_RX_FIELD, NVLINK_TX_FIELD, XID_EVENT
from windlass.units import GIB, MIB


class NoEvent(Exception):
    """As NVMLError_Timeout."""


def _wave(gpu: int, now: float) -> float:
    return 400 + 200 * math.sin(now / 60 + gpu)


class SimulatedNvml:
    """`watts`: of one GPU, as a function of its number and the time; by default a slow wave between 200 and 600."""

    def __init__(
        self, num_gpus: int = 8, clock: Callable[[], float] = time.monotonic, watts: Callable[[int, float], float] | None = None
    ) -> None:
        self._num_gpus, self._clock = num_gpus, clock
        self._watts: Callable[[int, float], float] = watts or _wave
        self._began = self._seen = clock()
        self._millijoules = [1e6 * (gpu + 1) for gpu in range(num_gpus)]
        self.heat = [0.0] * num_gpus
        """Degrees on top."""
        self.reasons = [0] * num_gpus
        self.ecc = [0] * num_gpus
        self.used_bytes = [60 * GIB] * num_gpus
        self._xids: deque[tuple[int, int]] = deque()

    def fail(self, gpu: int, xid: int) -> None:
        self._xids.append((gpu, xid))

    def _advance(self) -> float:
        """Energy is power times time, in steps of at most a tenth of a second."""
        now = self._clock()
        while self._seen < now:
            step = min(0.1, now - self._seen)
            for gpu in range(self._num_gpus):
                self._millijoules[gpu] += 1000 * step * self._watts(gpu, self._seen + step / 2)
            self._seen = self._seen + step if step == 0.1 else now
        return now

    # --- the functions of NVML that the exporter calls; a handle is the GPU's number

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802 - NVML's names
        return self._num_gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetIndex(self, gpu: int) -> int:  # noqa: N802
        return gpu

    def nvmlDeviceGetName(self, gpu: int) -> str:  # noqa: N802
        return "NVIDIA H200 (simulated)"

    def nvmlDeviceGetUUID(self, gpu: int) -> str:  # noqa: N802
        return f"GPU-simulated-{gpu}"

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: int) -> int:  # noqa: N802
        return 700_000

    def nvmlDeviceGetUtilizationRates(self, gpu: int) -> Any:  # noqa: N802
        share = int(self._watts(gpu, self._clock()) / 7)
        return Values(gpu=min(share, 100), memory=min(share // 2, 100))

    def nvmlDeviceGetMemoryInfo(self, gpu: int) -> Any:  # noqa: N802
        used = self.used_bytes[gpu]
        return Values(used=used, free=141 * GIB - used, total=141 * GIB)

    def nvmlDeviceGetTemperature(self, gpu: int, sensor: int) -> int:  # noqa: N802
        return int(35 + self._watts(gpu, self._clock()) / 20 + self.heat[gpu])

    def nvmlDeviceGetPowerUsage(self, gpu: int) -> int:  # noqa: N802
        return int(1000 * self._watts(gpu, self._clock()))

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: int) -> int:  # noqa: N802
        self._advance()
        return int(self._millijoules[gpu])

    def nvmlDeviceGetClockInfo(self, gpu: int, kind: int) -> int:  # noqa: N802
        return 3201 if kind == 2 else 1980 if not self.reasons[gpu] else 1200

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: int) -> int:  # noqa: N802
        return self.reasons[gpu]

    def nvmlDeviceGetTotalEccErrors(self, gpu: int, kind: int, counter: int) -> int:  # noqa: N802
        return self.ecc[gpu] if kind == 1 else 0

    def nvmlDeviceGetRemappedRows(self, gpu: int) -> tuple[int, int, int, int]:  # noqa: N802
        return 0, 0, 0, 0

    def nvmlDeviceGetPcieThroughput(self, gpu: int, direction: int) -> int:  # noqa: N802
        return 20_000

    def nvmlDeviceGetPcieReplayCounter(self, gpu: int) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetFieldValues(self, gpu: int, fields: list[int]) -> list[Any]:  # noqa: N802
        busy = int((self._clock() - self._began) * 1000 * MIB / 1024)
        values = {MEMORY_TEMP_FIELD: 55, NVLINK_TX_FIELD: busy, NVLINK_RX_FIELD: busy}
        return [Values(nvmlReturn=0, value=Values(ullVal=values[field])) for field in fields]

    def nvmlEventSetCreate(self) -> object:  # noqa: N802
        return object()

    def nvmlDeviceRegisterEvents(self, gpu: int, kinds: int, events: object) -> None:  # noqa: N802
        pass

    def nvmlEventSetWait_v2(self, events: object, milliseconds: int) -> Any:  # noqa: N802
        if not self._xids:
            raise NoEvent
        gpu, xid = self._xids.popleft()
        return Values(eventType=XID_EVENT, eventData=xid, device=gpu)
