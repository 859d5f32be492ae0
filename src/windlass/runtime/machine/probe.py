"""This machine as `Hardware`, from `gpus`, `system` and `bandwidth`."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from windlass.core.hardware.cpu import cpu_device
from windlass.core.hardware.devices import device, names
from windlass.core.hardware.notation import describe
from windlass.core.hardware.spec import Device, Hardware, Node
from windlass.runtime.machine.bandwidth import read_bandwidth
from windlass.runtime.machine.gpus import gpu_device, this_machines_gpus
from windlass.runtime.machine.system import System, this_system
from windlass.units import GB, MIB

METAL_SHARE = 0.75
"""Fraction of unified memory that Metal allows a process by default (recommendedMaxWorkingSetSize on machines above 36 GB)."""


def probe(folder: str | Path = ".", measure: bool = True, gpus: bool = True) -> Hardware:
    """`folder`: where weights would be stored, for free disk space. `measure`: memory bandwidth, once per boot. `gpus`: False leaves them out."""
    system = this_system()
    devices = [gpu_device(gpu) for gpu in this_machines_gpus()] if gpus else []
    speed = read_bandwidth(system.num_cores, cache_key(system)) if measure else None
    return as_hardware(system, devices, free_disk_bytes(Path(folder)), speed)


def cache_key(system: System) -> str:
    return f"{system.boot_id} {system.cpu_model} {system.num_cores}"


def free_disk_bytes(folder: Path) -> int:
    """Of the nearest existing parent folder, rounded down to a GB for display."""
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free // GB * GB


def as_hardware(system: System, gpus: Sequence[Device], disk_bytes: int, ram_bandwidth: float | None) -> Hardware:
    """One node: the GPUs, else Apple's GPU, else the CPUs as one device."""
    source = f"{system.cpu_model}; memory {'measured' if ram_bandwidth else 'estimated'}"
    cpu = cpu_device(system.num_cores, system.ram_bytes, ram_bandwidth, source, system.isa)
    apple = apple_device(system)
    devices = share_equal_devices(gpus) or ((apple,) if apple else (cpu,))
    ram_bytes = system.total_ram_bytes - apple.memory_bytes if apple and not gpus else system.ram_bytes
    node = Node(devices=devices, ram_bytes=ram_bytes, disk_bytes=disk_bytes, ram_bandwidth=cpu.measured_bandwidth)
    hardware = Hardware(nodes=(node,))
    return msgspec.structs.replace(hardware, description=describe(hardware))


def share_equal_devices(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Equal devices as one object, which makes later comparisons fast."""
    distinct: list[Device] = []
    for each in devices:
        if each not in distinct:
            distinct.append(each)
    return tuple(distinct[distinct.index(each)] for each in devices)


def apple_device(system: System) -> Device | None:
    """`Apple M4 Max` -> the catalog's M4-Max with this machine's memory; None for a chip that is not in the catalog."""
    prefix, _, chip = system.cpu_model.partition(" ")
    name = chip.strip().replace(" ", "-")
    if prefix != "Apple" or name not in names():
        return None
    smaller = f"{name}-32core"  # both have the same brand string, but only the smaller is sold with 36 GB
    if smaller in names() and system.total_ram_bytes <= 36 * 2**30:
        name = smaller
    memory_bytes = int(system.total_ram_bytes * METAL_SHARE) // MIB * MIB
    return msgspec.structs.replace(device(name), memory_bytes=memory_bytes)
