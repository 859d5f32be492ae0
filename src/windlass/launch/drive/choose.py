"""The driver of a scheduler."""

from __future__ import annotations

from windlass.launch.drive.pbs import Pbs
from windlass.launch.drive.process import BackgroundProcess
from windlass.launch.drive.slurm import Slurm
from windlass.launch.drive.state import Driver
from windlass.launch.job import Scheduler


def driver_of(scheduler: Scheduler) -> Driver:
    return {"slurm": Slurm, "pbs": Pbs, "ssh": BackgroundProcess, "local": BackgroundProcess}[scheduler]()
