"""Memory of this machine and of its processes. The only place that reads /proc/meminfo, /proc/PID/status and cgroup memory limits."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress

from windlass.core.model import Frozen
from windlass.runtime.machine.cgroups import group_folders
from windlass.runtime.machine.proc import ReadText, field_bytes, read_text
from windlass.units import MIB

UNLIMITED_BYTES = 2**60
"""Version 1 writes "no limit" as a number near 2^63."""


# --- the machine -----------------------------------------------------------------------------------------------------


class SystemMemory(Frozen):
    total_bytes: int
    available_bytes: int
    """The kernel's estimate (MemAvailable), without cgroup limits."""

    @property
    def used_bytes(self) -> int:
        return max(self.total_bytes - self.available_bytes, 0)


def system_memory(read: ReadText = read_text) -> SystemMemory:
    meminfo = read("/proc/meminfo")
    available = field_bytes(meminfo, "MemAvailable") or field_bytes(meminfo, "MemFree") or 0
    return SystemMemory(total_bytes=field_bytes(meminfo, "MemTotal") or 0, available_bytes=available)


def usable_bytes(read: ReadText = read_text) -> int:
    """What this process may still allocate: available memory within its cgroup limits, rounded down to a MiB for display."""
    return min([system_memory(read).available_bytes, *_cgroup_headrooms(read)]) // MIB * MIB


def limit_bytes(text: str) -> int | None:
    """memory.max or memory.limit_in_bytes; None without a limit."""
    stripped = text.strip()
    return int(stripped) if stripped.isdecimal() and int(stripped) < UNLIMITED_BYTES else None


def cgroup_headroom(limit: str, usage: str, stat: str) -> int | None:
    """A cgroup's limit less its usage, not counting file cache that the kernel can reclaim."""
    ceiling = limit_bytes(limit)
    if ceiling is None:
        return None
    used = int(usage.strip()) if usage.strip().isdecimal() else 0
    match = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
    return max(ceiling - max(used - (int(match[1]) if match else 0), 0), 0)


def _cgroup_headrooms(read: ReadText) -> list[int]:
    rooms: list[int | None] = []
    for folder in group_folders(read("/proc/self/cgroup"), "memory"):
        stat = read(f"{folder}/memory.stat")
        rooms.append(cgroup_headroom(read(f"{folder}/memory.max"), read(f"{folder}/memory.current"), stat))
        rooms.append(cgroup_headroom(read(f"{folder}/memory.limit_in_bytes"), read(f"{folder}/memory.usage_in_bytes"), stat))
    return [room for room in rooms if room is not None]


# --- processes -------------------------------------------------------------------------------------------------------


class ProcessMemory(Frozen):
    """Resident memory (RSS) of one process."""

    anonymous_bytes: int
    """Private and shared-memory pages."""
    file_bytes: int = 0
    """Pages of mapped files, which the kernel may reclaim at any time."""
    peak_bytes: int = 0
    """The highest RSS so far."""

    @property
    def resident_bytes(self) -> int:
        return self.anonymous_bytes + self.file_bytes


def process_memory(pid: int | None = None, read: ReadText = read_text) -> ProcessMemory:
    """None: this process. Zeros for a process that has exited. Outside Linux only this process's peak is known."""
    status = read(f"/proc/{'self' if pid is None else pid}/status")
    if not status and pid is None:
        peak = _getrusage_peak()
        return ProcessMemory(anonymous_bytes=peak, peak_bytes=peak)
    return parse_status(status)


def parse_status(status: str) -> ProcessMemory:
    """/proc/PID/status. Its VmHWM, unlike ru_maxrss, does not start at what the parent had when it forked."""

    def field(name: str) -> int:
        return field_bytes(status, name) or 0

    return ProcessMemory(
        anonymous_bytes=field("RssAnon") + field("RssShmem"), file_bytes=field("RssFile"), peak_bytes=field("VmHWM")
    )


def tree_resident_bytes(root: int, read: ReadText = read_text) -> int:
    """RSS summed over a process and its descendants; pages they share are counted once per process."""
    return sum(process_memory(pid, read).resident_bytes for pid in process_tree(root, read))


def process_tree(root: int, read: ReadText = read_text) -> list[int]:
    """`root` and all its descendants."""
    found = [root]
    for pid in found:
        children = " ".join(read(f"/proc/{pid}/task/{task}/children") for task in _tasks(pid))
        found += [int(word) for word in children.split()]
    return found


def _tasks(pid: int) -> list[str]:
    with suppress(OSError):
        return os.listdir(f"/proc/{pid}/task")  # noqa: PTH208 - names only
    return []


def _getrusage_peak() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
