"""What was measured on this machine, kept in a local file so that later plans use it: benchmark runs, and the machine's limits.

The file stays here and holds nothing but figures. WINDLASS_KEEP_MEASURED=0 keeps and uses nothing; removing the file forgets all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.core.hardware.measured import MeasuredLimits, MeasuredRun
from windlass.core.model import Frozen
from windlass.runtime.machine.folders import cache_dir
from windlass.runtime.machine.system import this_system

FILE = "measured.json"
MOST_RUNS = 200
"""The oldest are dropped."""


class Measured(Frozen):
    limits: dict[str, MeasuredLimits] = {}
    """By machine."""
    runs: tuple[MeasuredRun, ...] = ()


def wanted(environment: Mapping[str, str] | None = None) -> bool:
    given = os.environ if environment is None else environment
    return given.get("WINDLASS_KEEP_MEASURED", "1") != "0"


def this_machine() -> str:
    """Processor and GPUs: a figure holds for machines like this one."""
    from windlass.runtime.machine.gpus import this_machines_gpus

    system = this_system()
    gpus = [gpu.name for gpu in this_machines_gpus()]
    return " ".join((system.cpu_model, f"x{system.num_cores}", *gpus))


def path() -> Path:
    return cache_dir() / FILE


def load() -> Measured:
    """Nothing where there is no file, or one that cannot be read: figures are a help, never a need."""
    try:
        return msgspec.json.decode(path().read_bytes(), type=Measured)
    except (OSError, *DECODE_ERRORS):
        return Measured()


def runs_of(found: Measured, machine: str) -> tuple[MeasuredRun, ...]:
    return tuple(run for run in found.runs if run.machine == machine)


def with_runs(found: Measured, new: tuple[MeasuredRun, ...]) -> Measured:
    """A newer run replaces an older one of the same work."""
    again = {run.work for run in new}
    kept = [run for run in found.runs if run.work not in again]
    return msgspec.structs.replace(found, runs=(*kept, *new)[-MOST_RUNS:])


def with_limits(found: Measured, machine: str, limits: MeasuredLimits) -> Measured:
    return msgspec.structs.replace(found, limits={**found.limits, machine: limits})


def save(found: Measured) -> None:
    """Written beside and renamed; a full or read-only home is no reason to fail."""
    target = path()
    part = target.with_name(f"{FILE}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
        part.replace(target)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
