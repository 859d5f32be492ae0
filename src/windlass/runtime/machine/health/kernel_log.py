"""Errors of GPUs (XIDs) in the kernel's log, and what NVIDIA's catalogue says to do. `parse_xids` is pure."""

from __future__ import annotations

import re
import subprocess

from windlass.core.model import Frozen

# Severities by XID: NVIDIA's XID catalogue as kept by leptonai/gpud, and AWS's health checks.
RESTART, RESET, REBOOT, INSPECT = (
    "restart the program",
    "reset the GPU",
    "reboot the machine",
    "follow NVIDIA's work-flow; isolate the machine",
)
ACTIONS: dict[int, str] = (
    dict.fromkeys((13, 31, 32, 94), RESTART)
    | dict.fromkeys((46, 62, 64, 95, 109, 119, 120, 136, 140, 143, 155, 156, 158), RESET)
    | dict.fromkeys((79, 151), REBOOT)
    | dict.fromkeys((48, 74, *range(144, 151), 154), INSPECT)
)
HARMLESS = frozenset({43, 63, 92, 121})
FATAL = frozenset(number for number, action in ACTIONS.items() if action != RESTART)
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)(?:, (.*))?")


class Xid(Frozen):
    number: int
    device: str
    text: str = ""

    @property
    def action(self) -> str:
        return ACTIONS.get(self.number, "see NVIDIA's XID catalogue")


def parse_xids(log: str) -> tuple[Xid, ...]:
    """Each number of each device once, harmless ones left out."""
    found = (Xid(number=int(match[2]), device=match[1], text=(match[3] or "").strip()[:120]) for match in _XID.finditer(log))
    distinct = {(one.device, one.number): one for one in found if one.number not in HARMLESS}
    return tuple(distinct.values())


def kernel_log() -> str | None:
    """None: this user may not read it."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
