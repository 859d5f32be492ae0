"""The NVIDIA GPUs of this machine, through NVML. AMD GPUs and MIG slices are not detected: name them with the hardware argument.

`pynvml` (package nvidia-ml-py) is optional and imported only if the driver's device file exists.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from windlass.core.hardware.devices import (
    HOST_FRACTION,
    HOST_LINK_BYTES_PER_SECOND,
    MATMUL_FRACTION,
    READ_FRACTION,
    by_driver_name,
    device,
)
from windlass.core.hardware.spec import Device
from windlass.core.model import Frozen
from windlass.errors import BadInput, MissingExtra
from windlass.units import MIB

DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")
"""Linux, and WSL."""

FLOPS_PER_BYTE = 100
"""Assumed for a GPU that is not in the catalog: bf16 operations per byte of memory bandwidth. The catalog's NVIDIA cards have
37 (H20) and 76 (RTX 3090) to 420 (L40S), most of them above 150, so this errs low."""

UNKNOWN_BANDWIDTH = 200e9
"""Bytes per second of a GPU that does not report its memory clock."""


class Gpu(Frozen):
    """One GPU as the driver reports it."""

    name: str
    uuid: str
    memory_bytes: int | None
    """None for unified memory (GB10)."""
    memory_clock_mhz: int | None = None
    bus_width_bits: int | None = None
    watts: float | None = None


def gpu_device(gpu: Gpu) -> Device:
    """The catalog's figures with the driver's memory size; an estimate for a GPU that is not in the catalog."""
    name = by_driver_name(gpu.name)
    if name is None:
        return _estimate(gpu)
    known = device(name)
    if gpu.memory_bytes is None or gpu.memory_bytes == known.memory_bytes:
        return known
    return msgspec.structs.replace(known, memory_bytes=gpu.memory_bytes)


def bandwidth_from_clock(memory_clock_mhz: int, bus_width_bits: int) -> float:
    """Bytes per second; two transfers a clock, as NVML counts clocks (H100: 2619 MHz x 5120 bits -> 3.35 TB/s)."""
    return 2 * memory_clock_mhz * 1e6 * bus_width_bits / 8


def visible(gpus: Sequence[Gpu], cuda_visible_devices: str | None) -> list[Gpu]:
    """As CUDA reads CUDA_VISIBLE_DEVICES: indices or UUID prefixes, ending at the first invalid one."""
    if cuda_visible_devices is None:
        return list(gpus)
    chosen: list[Gpu] = []
    for word in (word.strip() for word in cuda_visible_devices.split(",")):
        if word.isdecimal():
            found = [gpus[int(word)]] if int(word) < len(gpus) else []
        else:
            found = [gpu for gpu in gpus if word and gpu.uuid.startswith(word)][:1]
        if not found:
            break
        chosen += found
    return chosen


def this_machines_gpus() -> list[Gpu]:
    if not any(Path(path).exists() for path in DRIVER_FILES):
        return []
    try:
        import pynvml  # large to import: only if there is a driver
    except ImportError as error:
        raise MissingExtra("nvidia-ml-py", "probe", "detecting NVIDIA GPUs") from error
    return visible(query(pynvml), os.environ.get("CUDA_VISIBLE_DEVICES"))


def query(nvml: Any) -> list[Gpu]:
    """`nvml`: the module pynvml, or a substitute."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise BadInput(f"NVML initialization failed ({error}); name the hardware instead, e.g. 8xH100-80GB") from error
    try:
        return [_read(nvml, nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(nvml.nvmlDeviceGetCount())]
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Any, handle: Any) -> Gpu:
    def ask(question: Callable[..., Any], *arguments: Any) -> Any:
        """None if the GPU does not support the query."""
        try:
            return question(handle, *arguments)
        except nvml.NVMLError:
            return None

    memory = ask(nvml.nvmlDeviceGetMemoryInfo)
    milliwatts = ask(nvml.nvmlDeviceGetPowerManagementLimit)
    return Gpu(
        name=_text(ask(nvml.nvmlDeviceGetName)),
        uuid=_text(ask(nvml.nvmlDeviceGetUUID)),
        memory_bytes=None if memory is None else int(memory.total) // MIB * MIB,
        memory_clock_mhz=ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_MEM),
        bus_width_bits=ask(nvml.nvmlDeviceGetMemoryBusWidth),
        watts=None if milliwatts is None else milliwatts / 1000,
    )


def _text(value: object) -> str:
    """Old versions of pynvml return bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def _estimate(gpu: Gpu) -> Device:
    known_clock = gpu.memory_clock_mhz and gpu.bus_width_bits
    bandwidth = bandwidth_from_clock(gpu.memory_clock_mhz or 0, gpu.bus_width_bits or 0) if known_clock else UNKNOWN_BANDWIDTH
    peak = bandwidth * FLOPS_PER_BYTE
    return Device(
        name=gpu.name or "unknown NVIDIA GPU",
        kind="cuda",
        memory_bytes=gpu.memory_bytes or 0,
        bandwidth=bandwidth,
        measured_bandwidth=bandwidth * READ_FRACTION,
        flops={"bf16": peak},
        measured_flops={"bf16": peak * MATMUL_FRACTION["bf16"]},
        link_bandwidth=HOST_LINK_BYTES_PER_SECOND["pcie4"],
        link_name="PCIe4 (assumed)",
        host_bandwidth=HOST_LINK_BYTES_PER_SECOND["pcie4"] * HOST_FRACTION,
        watts=gpu.watts or 0.0,
        source=f"not in the catalog: bandwidth from the driver's clocks, bf16 taken to be {FLOPS_PER_BYTE} operations per byte",
    )
