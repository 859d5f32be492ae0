"""Control groups (versions 1 and 2): where the limits of this process are found, and its CPU quota.

A container or a batch job owns less than the machine has.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from windlass.runtime.machine.proc import ReadText

CGROUP_ROOT = "/sys/fs/cgroup"


def group_folders(self_cgroup: str, controller: str) -> list[str]:
    """/proc/self/cgroup -> the folders whose limits apply to this process, from its own up to the root.

    `0::/path` is version 2, `4:memory:/path` version 1. In a container the path may be the one seen from outside.
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


def quota_cores(cpu_max: str) -> float | None:
    """`200000 100000` (version 2's cpu.max, or version 1's quota and period) -> 2.0; None without a limit."""
    match = re.fullmatch(r"\s*(\d+)\s+(\d+)\s*", cpu_max)
    return int(match[1]) / int(match[2]) if match and int(match[1]) > 0 and int(match[2]) > 0 else None


def cpu_quotas(read: ReadText) -> list[float]:
    quotas: list[float | None] = []
    for folder in group_folders(read("/proc/self/cgroup"), "cpu"):
        quotas.append(quota_cores(read(f"{folder}/cpu.max")))
        quotas.append(quota_cores(f"{read(f'{folder}/cpu.cfs_quota_us')} {read(f'{folder}/cpu.cfs_period_us')}"))
    return [quota for quota in quotas if quota is not None]
