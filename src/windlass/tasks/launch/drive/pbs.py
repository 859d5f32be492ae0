"""PBS Pro, OpenPBS and Torque: qsub, qstat -f, qdel. A training job that submits itself again is followed by its `next` files."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

from windlass.tasks.launch.drive.state import (
    JobState,
    Record,
    SchedulerFailed,
    agreed,
    clean_environment,
    ended_state,
    runs_of,
    state_of_code,
)
from windlass.tasks.launch.job import Rendered

SECONDS = 60
WAITING = {
    "Q": "queued",
    "H": "held",
    "W": "waits for its time",
    "T": "in transit",
    "S": "suspended",
    "U": "suspended",
    "M": "moved",
}
TIME_LIMIT = -29
"""Exit_status (JOB_EXEC_KILL_WALLTIME of OpenPBS)."""
RUNNING = {"R", "E", "B"}
"""B: an array that has begun."""


class Pbs:
    def submit(self, rendered: Rendered, folder: Path) -> str:
        answer = _run([*rendered.submit], folder).strip()
        if not answer:
            raise SchedulerFailed("qsub answered nothing instead of a job id; look with `qstat`")
        return answer.splitlines()[-1]

    def state(self, record: Record) -> JobState:
        folder, last = Path(record.folder), last_id(Path(record.folder), record.id)
        num_tasks = len(record.job.values) or 1
        try:
            found = parse_job(_run(["qstat", "-f", last]))
        except SchedulerFailed as error:
            known = "Unknown Job" in str(error) or "has finished" in str(error)
            reason = "the server no longer knows it, and it left no exit file" if known else str(error)
            return ended_state(folder, num_tasks) or JobState(state="unknown", reason=reason, is_lost=known)
        if found.state in ("running", "waiting"):
            return found
        return agreed(found, ended_state(folder, num_tasks)) or found

    def cancel(self, record: Record) -> None:
        _run(["qdel", last_id(Path(record.folder), record.id)])


def last_id(folder: Path, first: str) -> str:
    """The id under which the job goes on: the newest run's `next`."""
    for run in runs_of(folder):
        if (run / "next").exists():
            return (run / "next").read_text().strip() or first
    return first


def _run(argv: list[str], folder: Path | None = None) -> str:
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, env=clean_environment(), timeout=SECONDS, check=False, cwd=folder
        )
    except FileNotFoundError:
        raise SchedulerFailed(f"{argv[0]} is not installed here; run this on a login node of the cluster") from None
    except subprocess.TimeoutExpired:
        raise SchedulerFailed(f"{argv[0]} did not answer within {SECONDS} s; try again") from None
    if done.returncode:
        said = "; ".join(dict.fromkeys(line.strip() for line in done.stderr.splitlines() if line.strip()))
        raise SchedulerFailed(f"{argv[0]} failed: {said or f'exit code {done.returncode}'}")
    return done.stdout


def parse_job(text: str) -> JobState:
    """`qstat -f`: long values go on in lines that begin with a tab."""
    joined = re.sub(r"\n\t", "", text)
    fields = dict(re.findall(r"^\s*([\w.]+) = (.*)$", joined, re.MULTILINE))
    letter = fields.get("job_state", "").strip()
    if letter in WAITING:
        return JobState(state="waiting", reason=fields.get("comment", WAITING[letter]).strip())
    if letter in RUNNING:
        return JobState(state="running", hosts=hosts_of(fields.get("exec_host", "")))
    code = fields.get("Exit_status", fields.get("exit_status", "")).strip()
    return _ended(int(code)) if re.fullmatch(r"-?\d+", code) else JobState(state="failed", reason=f"state {letter}")


def _ended(code: int) -> JobState:
    """256 and the number of a signal: it was ended by one, with qdel as a rule (pbs_attributes.7B, Exit_status)."""
    if code == TIME_LIMIT:
        return JobState(state="failed", reason="the time limit was reached")
    if code - 256 in (signal.SIGTERM, signal.SIGKILL):
        return JobState(state="cancelled", reason=f"ended by {signal.Signals(code - 256).name}")
    return state_of_code(code)


def hosts_of(exec_host: str) -> str:
    """`n1/0*8+n2/0*8` -> `n1,n2`"""
    return ",".join(dict.fromkeys(part.split("/")[0] for part in exec_host.split("+") if part))
