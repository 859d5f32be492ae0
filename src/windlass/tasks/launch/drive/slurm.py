"""Slurm: sbatch, squeue, sacct, scancel. Answers are read in formats that 20.11 and 26.05 share; JSON differs by version."""

from __future__ import annotations

import re
import subprocess
from contextlib import suppress
from pathlib import Path

from windlass.core.model import Frozen
from windlass.tasks.launch.drive.state import (
    JobState,
    Record,
    SchedulerFailed,
    agreed,
    clean_environment,
    ended_state,
    state_of_code,
    worst,
)
from windlass.tasks.launch.job import Rendered

SECONDS = 60
"""A slurmctld that is busy answers late."""
FORMAT = "%i|%T|%N|%S|%r"
WAITING = {
    "PENDING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "SPECIAL_EXIT",
    "SUSPENDED",
    "STOPPED",
    "PREEMPTED",
    "RESV_DEL_HOLD",
}
"""PREEMPTED is not final: it is requeued."""
ENDINGS = {
    "TIMEOUT": "the time limit was reached",
    "DEADLINE": "its deadline passed",
    "NODE_FAIL": "a node of it was lost",
    "BOOT_FAIL": "a node could not be started",
    "OUT_OF_MEMORY": "it used more memory than it was given; ask for more with --memory",
}

# The scheduler's reason codes (squeue(1), JOB REASON CODES) in words, with what to do.
REASONS = {
    "Resources": "waits for nodes to become free",
    "Priority": "jobs with higher priority are before it",
    "Dependency": "waits for a job that it depends on",
    "BeginTime": "starts again after a pause (a requeued job waits about two minutes)",
    "JobHeldUser": "held by its user; `scontrol release` frees it",
    "JobHeldAdmin": "held by an administrator",
    "PartitionTimeLimit": "asks for more time than the partition allows; use a smaller --time or another --partition",
    "PartitionNodeLimit": "asks for more nodes than the partition has; use fewer --nodes or another --partition",
    "PartitionDown": "the partition is down",
    "PartitionInactive": "the partition is inactive",
    "PartitionConfig": "asks for what the partition does not have (time, nodes, memory): `scontrol show partition` lists its limits",
    "ReqNodeNotAvail": "nodes it needs are down, drained or reserved; `sinfo -R` says why",
    "NodeDown": "a node it needs is down",
    "BadConstraints": "no node has what it asks for",
    "InvalidAccount": "the account is unknown; check --account",
    "InvalidQOS": "the QOS is unknown; check --qos",
    "Licenses": "waits for a licence",
    "Reservation": "waits for its reservation to begin",
    "launch failed requeued held": "could not be started on a node and is held; `scontrol release` frees it, the node's slurmd log says why",
}  # fmt: skip


class QueueLine(Frozen):
    id: str
    state: str
    hosts: str
    started: str
    reason: str


class Slurm:
    def submit(self, rendered: Rendered, folder: Path) -> str:
        self._try(rendered)
        answer = _run([*rendered.submit])
        match = re.match(r"(\d+)", answer.strip().splitlines()[-1] if answer.strip() else "")
        if match is None:
            raise SchedulerFailed(f"sbatch answered {answer.strip()[:200]!r} instead of a job id; look with `squeue --me`")
        return match[1]

    def state(self, record: Record) -> JobState:
        try:
            lines = parse_queue(
                _run(["squeue", "--noheader", "--all", "--states=all", f"--format={FORMAT}", "--jobs", record.id])
            )
        except SchedulerFailed as error:
            if "Invalid job id" not in str(error):
                return ended_state(Path(record.folder), len(record.job.values) or 1, record.id) or JobState(
                    state="unknown", reason=f"slurmctld does not answer: {error}"
                )
            lines = []
        alive = [line for line in lines if not is_over(line.state)]
        if alive:
            return live_state(alive)
        own = ended_state(Path(record.folder), len(record.job.values) or 1, record.id)
        return _with_reason(agreed(self._accounted(record, lines), own) or LOST, lines)

    def cancel(self, record: Record) -> None:
        _run(["scancel", record.id])

    def _try(self, rendered: Rendered) -> None:
        """Refusals are cheaper before anything is queued."""
        _run([rendered.submit[0], "--test-only", rendered.submit[-1]])

    def _accounted(self, record: Record, lines: list[QueueLine]) -> JobState | None:
        """What sacct knows; without accounting, what squeue still shows of an ended job (MinJobAge)."""
        with suppress(SchedulerFailed):
            answer = _run(["sacct", "-n", "-P", "-X", "-o", "State,ExitCode", "-j", record.id])
            if answer.strip():
                return worst([ended(*[*line.split("|"), ""][:2]) for line in answer.splitlines() if line.strip()])
        return worst([ended(line.state, "") for line in lines]) if lines else None


def _with_reason(state: JobState, lines: list[QueueLine]) -> JobState:
    """Of a job that failed and wrote no exit code."""
    if state.state != "failed" or state.reason or not lines:
        return state
    return JobState(state="failed", reason=f"{lines[-1].reason}: its script was killed, and left no exit code")


LOST = JobState(
    state="unknown",
    reason="Slurm no longer knows it, and it left no exit file: it was cancelled, or its node was lost",
    is_lost=True,
)


def _run(argv: list[str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, env=clean_environment(), timeout=SECONDS, check=False)
    except FileNotFoundError:
        raise SchedulerFailed(f"{argv[0]} is not installed here; run this on a login node of the cluster") from None
    except subprocess.TimeoutExpired:
        raise SchedulerFailed(f"{argv[0]} did not answer within {SECONDS} s; try again") from None
    if done.returncode:
        raise SchedulerFailed(f"{argv[0]} failed: {complaint(done.stderr) or f'exit code {done.returncode}'}")
    return done.stdout


def slurm_answer(argv: list[str]) -> str:
    return _run(argv)


def complaint(text: str) -> str:
    """The reason may stand in any line: `sbatch: unrecognized option '--nosuch'`, then `Try "sbatch --help" for more information`."""
    lines = [re.sub(r"^\w+: (error: |fatal: )?", "", line.strip()) for line in text.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line and not line.startswith("Try ")))[:400]


def parse_queue(text: str) -> list[QueueLine]:
    lines = [line.split("|", 4) for line in text.splitlines() if line.count("|") >= 4]
    return [QueueLine(id=one[0], state=one[1], hosts=one[2], started=one[3], reason=one[4]) for one in lines]


def is_over(state: str) -> bool:
    return state.split()[0] not in WAITING | {"RUNNING", "COMPLETING", "CONFIGURING", "SIGNALING", "STAGE_OUT", "RESIZING"}


def live_state(lines: list[QueueLine]) -> JobState:
    """Of the tasks of an array, running ones count."""
    running = [line for line in lines if line.state not in WAITING]
    chosen = (running or lines)[0]
    if not running:
        return JobState(state="waiting", reason=explain(chosen.reason))
    several = f"{len(running)} of {len(lines)} tasks run" if len(lines) > 1 else ""
    return JobState(state="running", hosts=",".join(dict.fromkeys(line.hosts for line in running)), reason=several)


def explain(reason: str) -> str:
    """`(Resources)` -> words; an unknown one is passed on as it is."""
    bare = reason.strip().strip("()")
    code = bare.split(",")[0].split(":")[0].strip()
    if code.startswith(("QOS", "Assoc", "MaxJobs")):
        return f"{bare}: a limit of your account or QOS is reached"
    return f"{bare}: {REASONS[code]}" if code in REASONS else bare


def ended(state: str, exit_code: str) -> JobState:
    """`CANCELLED by 0`, `NODE_FAIL`, `TIMEOUT`, with sacct's `1:0`."""
    name = state.split()[0].rstrip("+")
    code, _, number = exit_code.partition(":")
    if name == "COMPLETED":
        return JobState(state="done")
    if name == "CANCELLED":
        return JobState(state="cancelled", reason=state)
    if name != "FAILED":
        return JobState(state="failed", reason=f"{state}: {ENDINGS[name]}" if name in ENDINGS else state)
    if number not in ("", "0"):
        return JobState(state="failed", reason=f"its script was killed by signal {number}")
    return state_of_code(int(code)) if code.isdecimal() and code != "0" else JobState(state="failed")
