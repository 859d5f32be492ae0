"""The health of NVIDIA GPUs through NVML: memory and who holds it, ECC, remapped rows, throttling, clocks, power, temperature."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from windlass.core.model import Frozen
from windlass.runtime.machine.gpus import DRIVER_FILES
from windlass.runtime.machine.proc import read_text

# nvml.h, nvmlClocksEventReason*: bits that mean trouble. Idle (0x1), the application's clocks (0x2) and the power cap (0x4) are usual.
SLOWDOWNS = {0x8: "hardware slowdown", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown", 0x80: "power brake"}


class GpuProcess(Frozen):
    pid: int
    name: str
    used_bytes: int


class GpuHealth(Frozen):
    """None: the GPU does not report it."""

    index: int
    name: str
    uuid: str = ""
    total_bytes: int = 0
    free_bytes: int = 0
    processes: tuple[GpuProcess, ...] = ()
    uncorrected_errors: int | None = None
    """ECC errors since the driver was loaded."""
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    throttle_bits: int = 0
    clock_mhz: int | None = None
    max_clock_mhz: int | None = None
    power_limit_watts: float | None = None
    default_power_limit_watts: float | None = None
    celsius: int | None = None
    slowdown_celsius: int | None = None
    link_width: int | None = None
    max_link_width: int | None = None


class GpuReport(Frozen):
    driver: str = ""
    cuda: str = ""
    """The newest CUDA that the driver runs: 12.8."""
    gpus: tuple[GpuHealth, ...] = ()
    problem: str = ""
    """Why NVML could not be asked."""


def this_machines_gpu_health() -> GpuReport:
    if not any(Path(path).exists() for path in DRIVER_FILES):
        return GpuReport()
    try:
        import pynvml
    except ImportError:
        return GpuReport(problem="nvidia-ml-py is not installed: pip install 'windlass-llm[probe]'")
    return query_health(pynvml)


def query_health(nvml: Any) -> GpuReport:
    """`nvml`: the module pynvml, or a substitute."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return GpuReport(problem=f"NVML does not start: {error}")
    try:
        count = nvml.nvmlDeviceGetCount()
        version = _ask(nvml, nvml.nvmlSystemGetCudaDriverVersion) or 0
        return GpuReport(
            driver=_text(_ask(nvml, nvml.nvmlSystemGetDriverVersion)),
            cuda=f"{version // 1000}.{version % 1000 // 10}" if version else "",
            gpus=tuple(_read(nvml, index) for index in range(count)),
        )
    except nvml.NVMLError as error:
        return GpuReport(problem=f"NVML lost a GPU: {error}")
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _ask(nvml: Any, question: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


def _read(nvml: Any, index: int) -> GpuHealth:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def ask(name: str, *arguments: Any) -> Any:
        question = getattr(nvml, name, None)  # older versions of pynvml lack some
        return None if question is None else _ask(nvml, question, handle, *arguments)

    memory, rows = ask("nvmlDeviceGetMemoryInfo"), ask("nvmlDeviceGetRemappedRows")
    limit, usual = ask("nvmlDeviceGetPowerManagementLimit"), ask("nvmlDeviceGetPowerManagementDefaultLimit")
    return GpuHealth(
        index=index,
        name=_text(ask("nvmlDeviceGetName")),
        uuid=_text(ask("nvmlDeviceGetUUID")),
        total_bytes=int(memory.total) if memory is not None else 0,
        free_bytes=int(memory.free) if memory is not None else 0,
        processes=_processes(ask("nvmlDeviceGetComputeRunningProcesses")),
        uncorrected_errors=ask("nvmlDeviceGetTotalEccErrors", 1, 0),  # NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
        throttle_bits=_first(ask("nvmlDeviceGetCurrentClocksEventReasons"), ask("nvmlDeviceGetCurrentClocksThrottleReasons")),
        clock_mhz=ask("nvmlDeviceGetClockInfo", 1),  # NVML_CLOCK_SM
        max_clock_mhz=ask("nvmlDeviceGetMaxClockInfo", 1),
        power_limit_watts=None if limit is None else limit / 1000,
        default_power_limit_watts=None if usual is None else usual / 1000,
        celsius=ask("nvmlDeviceGetTemperature", 0),  # NVML_TEMPERATURE_GPU
        slowdown_celsius=ask("nvmlDeviceGetTemperatureThreshold", 1),  # NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        link_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        max_link_width=ask("nvmlDeviceGetMaxPcieLinkWidth"),
    )


def _first(*values: Any) -> int:
    return int(next((value for value in values if value is not None), 0))


def _processes(found: Any) -> tuple[GpuProcess, ...]:
    own = os.getpid()
    return tuple(
        GpuProcess(
            pid=one.pid,
            name=read_text(f"/proc/{one.pid}/comm").strip() or "of another container",
            used_bytes=one.usedGpuMemory or 0,
        )
        for one in found or ()
        if one.pid != own
    )


def _text(value: object) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
