"""Jobs without a scheduler: a script in the background of this machine, in a session of its own (local, ssh)."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from windlass.runtime.machine.proc import read_text
from windlass.tasks.launch.drive.state import JobState, Record, clean_environment, ended_state
from windlass.tasks.launch.job import Rendered

SECONDS_TO_END = 60.0
"""For a checkpoint; then everything is killed."""


class BackgroundProcess:
    def submit(self, rendered: Rendered, folder: Path) -> str:
        with (folder / "log.txt").open("ab") as log:
            process = subprocess.Popen(
                [*rendered.submit[1:]],  # without setsid: the session is made here
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=clean_environment(),
                start_new_session=True,
            )
        return f"{process.pid}:{start_time(process.pid)}"

    def state(self, record: Record) -> JobState:
        if is_alive(record.id):
            return JobState(state="running", hosts=os.uname().nodename)
        ended = ended_state(Path(record.folder))
        return ended or JobState(
            state="failed", reason="its process is gone and left no exit code; it was killed, or the machine restarted"
        )

    def cancel(self, record: Record) -> None:
        """SIGTERM to the script, which passes it on; after a minute SIGKILL to all of its session."""
        pid = int(record.id.partition(":")[0])
        if not is_alive(record.id):
            return
        os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + SECONDS_TO_END
        while is_alive(record.id) and time.monotonic() < end:
            _reap(pid)
            time.sleep(0.1)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        _reap(pid)


def _reap(pid: int) -> None:
    """If it is our own child."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def start_time(pid: int) -> str:
    """In clock ticks since boot: a pid is used again, a pid with its start time is not."""
    fields = read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""


def is_alive(process: str) -> bool:
    pid, _, started = process.partition(":")
    state = read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return bool(state) and state[0] != "Z" and start_time(int(pid)) == started
