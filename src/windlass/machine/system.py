"""Cores and memory, from the text the operating system gives. All but the last two functions are pure, for tables to test.

A container or a batch job owns less than the machine has, so limits of control groups (versions 1 and 2) count.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from windlass.core.model import Frozen
from windlass.units import MIB

CGROUP_ROOT = "/sys/fs/cgroup"
UNLIMITED_BYTES = 2**60
"""Version 1 writes "no limit" as a number near 2^63."""

ReadText = Callable[[str], str]
"""A path -> its text, or nothing when it cannot be read."""


class System(Frozen):
    cpu_model: str
    num_cores: int
    """Physical cores this process may use."""
    ram_bytes: int
    """Memory this process may still take."""
    total_ram_bytes: int
    boot_id: str = ""


# --- cores -----------------------------------------------------------------------------------------------------------


def cpu_model(cpuinfo: str) -> str:
    """From /proc/cpuinfo; ARM has no model name there."""
    match = re.search(r"^(?:model name|Hardware|cpu model)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return match[1].strip() if match else "unknown CPU"


def physical_cores(cpuinfo: str, allowed: set[int]) -> int:
    """Distinct cores among the allowed logical CPUs: two threads of one core share its multipliers and its cache."""
    cores: set[tuple[str, str]] = set()
    for block in cpuinfo.split("\n\n"):
        pairs = (line.partition(":") for line in block.splitlines())
        fields = {key.strip(): value.strip() for key, colon, value in pairs if colon}
        number = fields.get("processor", "")
        if number.isdecimal() and int(number) in allowed:
            cores.add((fields.get("physical id", "0"), fields.get("core id", f"cpu{number}")))
    return len(cores) or max(len(allowed), 1)


def quota_cores(cpu_max: str) -> float | None:
    """`200000 100000` (version 2's cpu.max, or version 1's quota and period) -> 2.0; None without a limit."""
    match = re.fullmatch(r"\s*(\d+)\s+(\d+)\s*", cpu_max)
    return int(match[1]) / int(match[2]) if match and int(match[1]) > 0 and int(match[2]) > 0 else None


def usable_cores(physical: int, quotas: list[float]) -> int:
    return max(1, min([physical, *(math.ceil(quota) for quota in quotas)]))


# --- memory ----------------------------------------------------------------------------------------------------------


def meminfo_bytes(meminfo: str, field: str) -> int | None:
    match = re.search(rf"^{re.escape(field)}:\s*(\d+)\s*kB", meminfo, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def limit_bytes(text: str) -> int | None:
    """memory.max or memory.limit_in_bytes; None without a limit."""
    stripped = text.strip()
    return int(stripped) if stripped.isdecimal() and int(stripped) < UNLIMITED_BYTES else None


def room_in_group(limit: str, usage: str, stat: str) -> int | None:
    """What a control group may still take: its limit less its use, not counting file cache that the kernel can drop."""
    ceiling = limit_bytes(limit)
    if ceiling is None:
        return None
    used = int(usage.strip()) if usage.strip().isdecimal() else 0
    match = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
    return max(ceiling - max(used - (int(match[1]) if match else 0), 0), 0)


def available_bytes(meminfo: str, rooms: list[int]) -> int:
    """Rounded down to a MiB, so that it reads well."""
    free = meminfo_bytes(meminfo, "MemAvailable") or meminfo_bytes(meminfo, "MemFree") or 0
    return min([free, *rooms]) // MIB * MIB


# --- control groups --------------------------------------------------------------------------------------------------


def group_folders(self_cgroup: str, controller: str) -> list[str]:
    """/proc/self/cgroup -> the folders whose limits bind this process, from its own up to the root.

    `0::/path` is version 2, `4:memory:/path` version 1. In a container the path may be one seen from outside.
    """
    folders: list[str] = []
    for line in self_cgroup.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        root = f"{CGROUP_ROOT}/{controller}" if controllers else CGROUP_ROOT
        here = PurePosixPath("/" + path.strip().lstrip("/"))
        folders += [f"{root}{str(folder).rstrip('/')}" for folder in (here, *here.parents)]
    return folders or [CGROUP_ROOT, f"{CGROUP_ROOT}/{controller}"]


def cpu_quotas(read: ReadText) -> list[float]:
    quotas: list[float | None] = []
    for folder in group_folders(read("/proc/self/cgroup"), "cpu"):
        quotas.append(quota_cores(read(f"{folder}/cpu.max")))
        quotas.append(quota_cores(f"{read(f'{folder}/cpu.cfs_quota_us')} {read(f'{folder}/cpu.cfs_period_us')}"))
    return [quota for quota in quotas if quota is not None]


def memory_rooms(read: ReadText) -> list[int]:
    rooms: list[int | None] = []
    for folder in group_folders(read("/proc/self/cgroup"), "memory"):
        stat = read(f"{folder}/memory.stat")
        rooms.append(room_in_group(read(f"{folder}/memory.max"), read(f"{folder}/memory.current"), stat))
        rooms.append(room_in_group(read(f"{folder}/memory.limit_in_bytes"), read(f"{folder}/memory.usage_in_bytes"), stat))
    return [room for room in rooms if room is not None]


# --- whole systems ---------------------------------------------------------------------------------------------------


def linux(read: ReadText, allowed: set[int]) -> System:
    cpuinfo, meminfo = read("/proc/cpuinfo"), read("/proc/meminfo")
    return System(
        cpu_model=cpu_model(cpuinfo),
        num_cores=usable_cores(physical_cores(cpuinfo, allowed), cpu_quotas(read)),
        ram_bytes=available_bytes(meminfo, memory_rooms(read)),
        total_ram_bytes=meminfo_bytes(meminfo, "MemTotal") or 0,
        boot_id=read("/proc/sys/kernel/random/boot_id").strip(),
    )


def macos(sysctl: str) -> System:
    """The output of `sysctl machdep.cpu.brand_string hw.physicalcpu hw.memsize kern.boottime`."""
    fields = dict(re.findall(r"^([\w.]+):\s*(.+)$", sysctl, re.MULTILINE))
    total = int(fields.get("hw.memsize", "0"))
    return System(
        cpu_model=fields.get("machdep.cpu.brand_string", "unknown CPU"),
        num_cores=int(fields.get("hw.physicalcpu", "1")),
        ram_bytes=total // 4 * 3 // MIB * MIB,  # macOS keeps no plain count of what is free; a quarter is left to it
        total_ram_bytes=total,
        boot_id=fields.get("kern.boottime", ""),
    )


def read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def this_system() -> System:
    if sys.platform == "darwin":
        names = ["machdep.cpu.brand_string", "hw.physicalcpu", "hw.memsize", "kern.boottime"]
        return macos(subprocess.run(["sysctl", *names], capture_output=True, text=True, check=False).stdout)
    return linux(read_text, os.sched_getaffinity(0))
