"""The driver of a scheduler."""

from __future__ import annotations

from windlass.tasks.launch.drive.pbs import Pbs
from windlass.tasks.launch.drive.process import BackgroundProcess
from windlass.tasks.launch.drive.slurm import Slurm
from windlass.tasks.launch.drive.state import Driver
from windlass.tasks.launch.job import Scheduler


def driver_of(scheduler: Scheduler) -> Driver:
    return {"slurm": Slurm, "pbs": Pbs, "ssh": BackgroundProcess, "local": BackgroundProcess}[scheduler]()
