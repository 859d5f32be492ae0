"""Processors, memory, disks and network of this machine, under node_exporter's names."""

from __future__ import annotations

import os
import re
import time

from windlass.core.metrics import node as m
from windlass.runtime.machine.memory import system_memory
from windlass.runtime.machine.proc import ReadText, read_text
from windlass.tasks.observe.node.readings import Readings

TICKS = float(os.sysconf("SC_CLK_TCK"))
MODES = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
SECTOR_BYTES = 512
"""/proc/diskstats counts in these, whatever the disk has (kernel.org, admin-guide/iostats)."""
NO_FILESYSTEMS = frozenset(
    "autofs bpf cgroup cgroup2 configfs debugfs devpts devtmpfs fusectl hugetlbfs mqueue nsfs proc pstore ramfs securityfs sysfs tracefs "
    "squashfs overlay binfmt_misc rpc_pipefs".split()
)
NO_DISKS = re.compile(r"^(?:ram|loop|fd|dm-|zram|sr)\d*|\d+p\d+$|^[hsv]d[a-z]+\d+$")
NO_INTERFACES = re.compile(r"^(?:lo|veth\w*|docker\d*|br-\w+)$")
IN_MEMORY = "tmpfs"
SYSTEMS_OWN = re.compile(r"^/(?:proc|sys|run/credentials|run/secrets)(?:/|$)")
"""Small file systems in memory there are the kernel's, or a container's masks."""
MAX_FILESYSTEMS = 32


def add_host(found: Readings, read: ReadText = read_text) -> None:
    _cpu(found, read("/proc/stat"))
    load = read("/proc/loadavg").split()
    found.add(m.LOAD, float(load[0]) if load else None)
    memory = system_memory(read)
    found.add(m.MEMORY_TOTAL, memory.total_bytes)
    found.add(m.MEMORY_AVAILABLE, memory.available_bytes)
    for device, kind, place in filesystems(read("/proc/self/mounts")):
        _filesystem(found, device, kind, place)
    _disks(found, read("/proc/diskstats"))
    _network(found, read("/proc/net/dev"))
    found.add(m.NODE_TIME, time.time())


def _cpu(found: Readings, stat: str) -> None:
    """Over all processors: 200 cores by 8 modes would be most of the series of a machine."""
    words = stat.partition("\n")[0].split()
    for mode, ticks in zip(MODES, words[1:], strict=False):
        found.add(m.CPU_SECONDS, int(ticks) / TICKS, {"cpu": "all", "mode": mode})


def filesystems(mounts: str) -> list[tuple[str, str, str]]:
    """(device, type, place), each device once, at the first place it is mounted. Those in memory (/dev/shm, /tmp) have no device of their own."""
    chosen: dict[str, tuple[str, str, str]] = {}
    for line in mounts.splitlines():
        words = line.split()
        if len(words) >= 3 and words[2] not in NO_FILESYSTEMS and not words[2].startswith("fuse."):
            place = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), words[1])
            if words[2] != IN_MEMORY:
                chosen.setdefault(words[0], (words[0], words[2], place))
            elif not SYSTEMS_OWN.match(place):
                chosen[f"{IN_MEMORY} {place}"] = (words[0], IN_MEMORY, place)
    return list(chosen.values())[:MAX_FILESYSTEMS]


def _filesystem(found: Readings, device: str, kind: str, place: str) -> None:
    try:
        stat = os.statvfs(place)
    except OSError:
        return
    labels = {"device": device, "fstype": kind, "mountpoint": place}
    if stat.f_blocks:
        found.add(m.FILESYSTEM_SIZE, stat.f_blocks * stat.f_frsize, labels)
        found.add(m.FILESYSTEM_AVAIL, stat.f_bavail * stat.f_frsize, labels)


def _disks(found: Readings, text: str) -> None:
    for words in map(str.split, text.splitlines()):
        if len(words) >= 10 and not NO_DISKS.search(words[2]):
            found.add(m.DISK_READ, int(words[5]) * SECTOR_BYTES, {"device": words[2]})
            found.add(m.DISK_WRITTEN, int(words[9]) * SECTOR_BYTES, {"device": words[2]})


def _network(found: Readings, text: str) -> None:
    for line in text.splitlines():
        name, colon, rest = line.partition(":")
        words = rest.split()
        if colon and len(words) >= 9 and not NO_INTERFACES.match(name.strip()):
            found.add(m.NETWORK_RECEIVED, int(words[0]), {"device": name.strip()})
            found.add(m.NETWORK_SENT, int(words[8]), {"device": name.strip()})
