"""The eight steps of a cluster's set-up: what each finds, and what it would change. Pure; `cli/launch/init.py` does it.

Prerequisites, local disks, network, hostfile, ssh keys, connectivity and GPUs, launch settings, a job script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from windlass.core.model import Frozen
from windlass.errors import BadInput

Outcome = Literal["there", "done", "would", "declined", "failed", "skipped"]
STEPS = (
    "prerequisites", "local disks", "network", "hostfile", "ssh keys", "connectivity and GPUs", "launch settings", "job script",
)  # fmt: skip
LOCAL_DISKS = ("/local", "/scratch", "/nvme", "/mnt/nvme", "/mnt/local", "/raid", "/tmp")
PROGRAMS = {
    "ssh": "openssh-client", "ssh-keygen": "openssh-client", "ip": "iproute2", "python3": "python3", "g++": "g++ (CPU kernels)",
}  # fmt: skip


class StepResult(Frozen):
    step: str
    outcome: Outcome
    detail: str


def missing_programs(found: Mapping[str, bool]) -> list[str]:
    """Packages to install, for programs that are not there."""
    return [package for program, package in PROGRAMS.items() if not found.get(program)]


def choose_disk(free_bytes: Mapping[str, int], is_memory: Mapping[str, bool]) -> str:
    """The largest of the usual places that is no file system in memory; empty if there is none."""
    real = {place: free for place, free in free_bytes.items() if not is_memory.get(place)}
    return max(real, key=real.__getitem__, default="")


def hostfile_lines(hosts: Sequence[str], slots: int) -> str:
    return "".join(f"{host}{f' slots={slots}' if slots else ''}\n" for host in hosts)


def expand_hosts(text: str) -> list[str]:
    """`node[001-003,7],login` -> each name, as Slurm writes lists."""
    import re

    found: list[str] = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)?", text):
        match = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", part.strip())
        if match is None:
            found += [part.strip()] if part.strip() else []
            continue
        for piece in match[2].split(","):
            first, dash, last = piece.strip().partition("-")
            if not first.isdecimal() or (dash and not last.isdecimal()):
                raise BadInput(f"{part.strip()!r} names no machines; write them like node[001-004,7] or with commas between them")
            numbers = range(int(first), int(last) + 1) if dash else range(int(first), int(first) + 1)
            found += [f"{match[1]}{number:0{len(first)}}{match[3]}" for number in numbers]
    return found


def settings_toml(values: Mapping[str, object]) -> str:
    """launch.toml: strings, numbers and booleans only."""
    lines = ["# Defaults of `windlass launch` at this site; the command line overrides them."]
    for key, value in values.items():
        shown = str(value).lower() if isinstance(value, bool) else str(value) if isinstance(value, int) else _quoted(str(value))
        lines.append(f"{key} = {shown}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
