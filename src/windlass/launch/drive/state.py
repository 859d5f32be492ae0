"""The state of a job, in the same words for every scheduler, and what its own files say. Reads files only."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from windlass.core.model import Frozen
from windlass.errors import Error
from windlass.launch.job import Job, Rendered, Scheduler

StateName = Literal["waiting", "running", "done", "stopped", "failed", "cancelled", "unknown"]
STOPPED = 75


class SchedulerFailed(Error):
    """The scheduler refused, or cannot be reached."""


class Record(Frozen):
    """A submitted job, as this machine remembers it."""

    name: str
    scheduler: Scheduler
    folder: str
    id: str
    """The scheduler's; of a process its pid and start time."""
    submitted: float
    job: Job
    workdir: str = ""


class JobState(Frozen):
    state: StateName
    reason: str = ""
    """Why it waits, or how it ended."""
    hosts: str = ""
    started: float | None = None
    is_lost: bool = False
    """The scheduler has forgotten it, and it left no exit file: nothing more will be heard of it."""

    @property
    def is_final(self) -> bool:
        return self.is_lost or self.state in ("done", "stopped", "failed", "cancelled")


class Driver(Protocol):
    def submit(self, rendered: Rendered, folder: Path) -> str:
        """Returns the id."""
        ...

    def state(self, record: Record) -> JobState: ...

    def cancel(self, record: Record) -> None: ...


class Exit(Frozen):
    """exit.json, written by the script itself: the truth where no accounting is installed."""

    code: int
    ended: int = 0


def runs_of(folder: Path, job_id: str = "") -> list[Path]:
    """Folders of attempts, newest first; of one id only, if it is given."""
    with suppress(OSError):
        named = [f"run-{job_id}-*", f"run-{job_id}_*"] if job_id else ["run-*"]  # not those of job 123 for job 12
        found = [path for name in named for path in folder.glob(name) if path.is_dir()]
        return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
    return []


def exit_of(run: Path) -> Exit | None:
    try:
        return msgspec.json.decode((run / "exit.json").read_bytes(), type=Exit)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def ended_state(folder: Path, num_tasks: int = 1, job_id: str = "") -> JobState | None:
    """From the exit files; None if one is missing. `num_tasks`: of an array."""
    runs = runs_of(folder, job_id)
    exits = [found for run in runs if (found := exit_of(run)) is not None]
    if len(exits) < num_tasks or not exits:
        return None
    codes = [one.code for one in exits[: max(num_tasks, 1)]]
    return state_of_code(max(codes), sum(code != 0 for code in codes), num_tasks)


def state_of_code(code: int, num_failed: int = 1, num_tasks: int = 1) -> JobState:
    if code == 0:
        return JobState(state="done")
    if code == STOPPED:
        return JobState(state="stopped", reason="saved and stopped; launch it again to go on")
    if code in (143, 130):
        return JobState(state="cancelled", reason="ended by a signal")
    several = f"{num_failed} of {num_tasks} tasks; " if num_tasks > 1 else ""
    return JobState(state="failed", reason=f"{several}exit code {code}")


def logs_of(folder: Path) -> list[Path]:
    """Newest last."""
    with suppress(OSError):
        found = [*folder.glob("log*.txt"), *folder.glob("*.o[0-9]*"), *folder.glob("*.OU")]
        return sorted(found, key=lambda path: path.stat().st_mtime)
    return []


def clean_environment() -> dict[str, str]:
    """Without what a job that submits another would pass on: bindings, array numbers, PMIx (facts of submitit#1782, #1814)."""
    leaked = ("SLURM_", "SBATCH_", "SRUN_", "PMIX_", "PMI_", "PBS_")
    kept = ("SLURM_CONF", "PBS_CONF_FILE", "PBS_SERVER", "PBS_EXEC")
    return {name: value for name, value in os.environ.items() if name in kept or not name.startswith(leaked)}
