"""The state of a job, in the same words for every scheduler, and what its own files say. Reads files only."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from windlass.core.model import Frozen
from windlass.errors import Error
from windlass.tasks.launch.job import SECRETS, STOPPED, Job, Rendered, Scheduler

StateName = Literal["waiting", "running", "done", "stopped", "failed", "cancelled", "unknown"]
SECONDS_TO_START = 30
"""A scheduler counts the time limit from before the script starts."""


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
    host: str = ""
    """Of the node that failed first."""
    told: int | None = None
    """Seconds after which a signal told the script to end; None: it ended by itself."""
    limit: int | None = None
    """The time limit in seconds."""
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
    return worst([state_of_exit(one) for one in exits[: max(num_tasks, 1)]])


def state_of_exit(found: Exit) -> JobState:
    """Who was told to end was cancelled, whatever its code: servers end well when they are told to."""
    if found.code == STOPPED:
        return SAVED
    if found.told is not None:
        if found.limit is not None and found.told >= found.limit - SECONDS_TO_START:
            return JobState(state="failed", reason="the time limit was reached")
        return JobState(state="cancelled", reason="ended by a signal")
    return state_of_code(found.code, found.host)


SAVED = JobState(state="stopped", reason="saved and stopped; launch it again to go on")


def state_of_code(code: int, host: str = "") -> JobState:
    if code == 0:
        return JobState(state="done")
    if code == STOPPED:
        return SAVED
    by_signal = ""
    with suppress(ValueError):
        by_signal = f" ({signal.Signals(code - 128).name})" if code > 128 else ""
    return JobState(state="failed", reason=f"exit code {code}{by_signal}{f' on {host}' if host else ''}")


def worst(tasks: Sequence[JobState]) -> JobState:
    """Of an array, how most would say that it ended: one failure is a failure."""
    for name in ("failed", "cancelled", "stopped", "done"):
        ended_so = [task for task in tasks if task.state == name]
        if ended_so:
            several = f"{len(ended_so)} of {len(tasks)} tasks" if len(tasks) > 1 and name != "done" else ""
            reasons = "; ".join(dict.fromkeys(task.reason for task in ended_so if task.reason))
            return msgspec.structs.replace(ended_so[0], reason=": ".join(filter(None, (several, reasons))))
    return tasks[0]


def agreed(said: JobState | None, own: JobState | None) -> JobState | None:
    """What the scheduler says of an ended job, and what its own files say: the scheduler knows who ended it, the files know why."""
    if said is None or own is None:
        return said or own
    if own.state == "stopped" and said.state != "done":
        return own if said.state == "stopped" else msgspec.structs.replace(own, reason=f"{said.reason}; it had {own.reason}")
    if own.state != said.state or own.reason.startswith(said.reason):
        return said if own.state != said.state else own
    more = f"; {own.reason}" if own.reason not in said.reason else ""
    return msgspec.structs.replace(said, reason=f"{said.reason}{more}")


def remove_secrets(folder: Path) -> None:
    """A script that was killed could not."""
    for name in (*SECRETS, "address.json"):
        with suppress(OSError):
            (folder / name).unlink(missing_ok=True)


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
