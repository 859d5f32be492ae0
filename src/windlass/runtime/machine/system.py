"""CPU model, cores and memory that this process may use, parsed from /proc or sysctl. Pure except `this_system`."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys

from windlass.core.model import Frozen
from windlass.runtime.machine.cgroups import cpu_quotas
from windlass.runtime.machine.memory import system_memory, usable_bytes
from windlass.runtime.machine.proc import ReadText, read_text
from windlass.units import MIB


class System(Frozen):
    cpu_model: str
    num_cores: int
    """Physical cores this process may use."""
    ram_bytes: int
    """Memory this process may still allocate."""
    total_ram_bytes: int
    boot_id: str = ""
    isa: str = ""
    """avx512, avx2 or neon (core.hardware.cpu.ISA_FACTOR); empty: unknown."""


# --- cores -----------------------------------------------------------------------------------------------------------


def cpu_model(cpuinfo: str) -> str:
    """From /proc/cpuinfo; ARM has no model name there."""
    match = re.search(r"^(?:model name|Hardware|cpu model)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return match[1].strip() if match else "unknown CPU"


def cpu_isa(cpuinfo: str) -> str:
    """From /proc/cpuinfo. AVX-512 counts if it has products of bytes (VNNI), as on the machines that plans' rates are from; AMX, which our
    kernels do not use, does not."""
    match = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    flags = set(match[1].split()) if match else set[str]()
    if {"avx512f", "avx512bw", "avx512_vnni"} <= flags:
        return "avx512"
    return "avx2" if "avx2" in flags else "neon" if "asimd" in flags else ""


def physical_cores(cpuinfo: str, allowed: set[int]) -> int:
    """Distinct cores among the allowed logical CPUs: hyperthreads share a core's execution units and cache."""
    cores: set[tuple[str, str]] = set()
    for block in cpuinfo.split("\n\n"):
        pairs = (line.partition(":") for line in block.splitlines())
        fields = {key.strip(): value.strip() for key, colon, value in pairs if colon}
        number = fields.get("processor", "")
        if number.isdecimal() and int(number) in allowed:
            cores.add((fields.get("physical id", "0"), fields.get("core id", f"cpu{number}")))
    return len(cores) or max(len(allowed), 1)


def usable_cores(physical: int, quotas: list[float]) -> int:
    return max(1, min([physical, *(math.ceil(quota) for quota in quotas)]))


# --- whole systems ---------------------------------------------------------------------------------------------------


def linux(read: ReadText, allowed: set[int]) -> System:
    cpuinfo = read("/proc/cpuinfo")
    return System(
        cpu_model=cpu_model(cpuinfo),
        num_cores=usable_cores(physical_cores(cpuinfo, allowed), cpu_quotas(read)),
        ram_bytes=usable_bytes(read),
        total_ram_bytes=system_memory(read).total_bytes,
        boot_id=read("/proc/sys/kernel/random/boot_id").strip(),
        isa=cpu_isa(cpuinfo),
    )


def macos(sysctl: str) -> System:
    """The output of `sysctl machdep.cpu.brand_string hw.physicalcpu hw.memsize kern.boottime`."""
    fields = dict(re.findall(r"^([\w.]+):\s*(.+)$", sysctl, re.MULTILINE))
    total = int(fields.get("hw.memsize", "0"))
    return System(
        cpu_model=fields.get("machdep.cpu.brand_string", "unknown CPU"),
        num_cores=int(fields.get("hw.physicalcpu", "1")),
        ram_bytes=total // 4 * 3 // MIB * MIB,  # macOS has no count of available memory; a quarter is left to the system
        total_ram_bytes=total,
        boot_id=fields.get("kern.boottime", ""),
    )


def this_system() -> System:
    if sys.platform == "darwin":
        names = ["machdep.cpu.brand_string", "hw.physicalcpu", "hw.memsize", "kern.boottime"]
        return macos(subprocess.run(["sysctl", *names], capture_output=True, text=True, check=False).stdout)
    return linux(read_text, os.sched_getaffinity(0))
