"""`windlass launch status|logs|cancel|list`: jobs that were launched from this machine."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.errors import BadInput, Error
from windlass.units import format_seconds

if TYPE_CHECKING:
    from windlass.tasks.launch.drive.state import JobState, Record

SECONDS_BETWEEN_LOOKS = 1.0
CANCELLED = "cancelled"
"""A file of the job's folder: a server that is told to end says that it ended well."""
COLUMNS = ("job", "scheduler", "state", "nodes", "since", "address", "log")
WIDE = 120
"""Columns of a terminal that has room for the paths of logs."""
AT_ONCE = 16


def state_of(record: Record) -> JobState:
    """A scheduler that cannot be reached loses nothing: the state is then unknown, with the reason."""
    from windlass.tasks.launch.drive.choose import driver_of
    from windlass.tasks.launch.drive.state import JobState

    try:
        found = driver_of(record.scheduler).state(record)
    except Error as error:
        return JobState(state="unknown", reason=str(error))
    if found.is_final:
        _clean(record)
    was_cancelled = (Path(record.folder) / CANCELLED).exists()
    return JobState(state="cancelled") if was_cancelled and found.state in ("done", "failed", "unknown") else found


def _clean(record: Record) -> None:
    """The secrets of a server whose script was killed, or never started; not those of a later job in the same folder."""
    from windlass.tasks.launch.drive.state import remove_secrets
    from windlass.tasks.launch.registry import all_jobs, jobs_directory

    if record.job.kind != "serve":
        return
    last = next((one for one in all_jobs(jobs_directory()) if one.folder == record.folder), record)
    if last.name == record.name:
        remove_secrets(Path(record.folder))


def row(record: Record) -> dict[str, Any]:
    from windlass.tasks.launch.drive.state import logs_of

    state, folder = state_of(record), Path(record.folder)
    logs = logs_of(folder)
    address = _address(folder)
    return {
        "name": record.name,
        "id": record.id,
        "scheduler": record.scheduler,
        "state": state.state,
        "reason": state.reason,
        "nodes": record.job.num_nodes,
        "hosts": state.hosts,
        "submitted": record.submitted,
        "address": address.get("url", ""),
        "api_key_file": address.get("api_key_file", ""),
        "log": str(logs[-1]) if logs else "",
        "folder": record.folder,
        "command": list(record.job.command),
    }


def _address(folder: Path) -> dict[str, str]:
    try:
        return msgspec.json.decode((folder / "address.json").read_bytes(), type=dict[str, str])
    except (OSError, *DECODE_ERRORS):
        return {}


def _found(name: str) -> Record:
    from windlass.tasks.launch.registry import find_job, jobs_directory

    return find_job(jobs_directory(), name)


def show_list(as_json: bool) -> int:
    from windlass.tasks.launch.registry import all_jobs, jobs_directory

    records = all_jobs(jobs_directory())
    with ThreadPoolExecutor(AT_ONCE) as pool:  # a scheduler that does not answer is waited for once, not once a job
        rows = list(pool.map(row, records))
    if as_json:
        print(msgspec.json.encode(rows).decode())
        return 0
    if not rows:
        print("no jobs; `windlass launch local -- bench MODEL` starts one here")
        return 0
    from rich.table import Table

    from windlass.cli.console import console

    is_wide = console().width >= WIDE
    table = Table(box=None, pad_edge=False)
    for name in COLUMNS if is_wide else COLUMNS[:-1]:
        table.add_column(name, overflow="fold")  # names and addresses are copied: never cut off
    for one in rows:
        since = format_seconds(max(time.time() - one["submitted"], 0)) + " ago"
        words = [one["name"], one["scheduler"], one["state"], str(one["nodes"]), since, one["address"]]
        table.add_row(*words, *([one["log"]] if is_wide else []))
    console().print(table)
    return 0


def show_status(name: str, as_json: bool) -> int:
    """Exit code 0 while it waits, runs or is done; 1 if it is stopped or cancelled; 2 if it failed."""
    found = row(_found(name))
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        shown = [("state", ": ".join(filter(None, (found["state"], found["reason"]))))]
        shown += [
            (key, found[key]) for key in ("scheduler", "id", "hosts", "address", "api_key_file", "log", "folder") if found[key]
        ]
        for key, value in shown:
            print(f"{key.replace('_', ' '):<13} {value}")
    return {"failed": 2, "stopped": 1, "cancelled": 1}.get(found["state"], 0)


def show_logs(name: str, follow_it: bool, lines: int) -> int:
    from windlass.tasks.launch.drive.state import logs_of

    record = _found(name)
    if follow_it:
        return follow(record, lines)
    logs = logs_of(Path(record.folder))
    if not logs:
        state = state_of(record)
        raise BadInput(f"{record.name} has no log yet: {state.state}{f', {state.reason}' if state.reason else ''}")
    shown = logs if record.job.values else logs[-1:]  # the tasks of an array have a log each
    for log in shown:
        if len(shown) > 1:
            print(f"==> {log.name} <==")
        for line in log.read_text(errors="replace").splitlines()[-lines:]:
            print(line)
    return 0


def follow(record: Record, lines: int | None = None) -> int:
    """Prints the log as it grows, until the job ends; Ctrl-C leaves the job alone. Returns the job's outcome.

    `lines`: of what is there already, only so many."""
    tail, said = _Tail(Path(record.folder), lines), ""
    while True:
        state = state_of(record)
        tail.print_new()
        shown = f"{state.state}{f': {state.reason}' if state.reason else ''}"
        if shown != said and (state.state in ("waiting", "unknown") or state.is_final):
            print(f"windlass: {record.name} is {shown}", file=sys.stderr, flush=True)
        said = shown
        if state.is_final:
            return {"done": 0, "stopped": 75}.get(state.state, 4)
        time.sleep(SECONDS_BETWEEN_LOOKS)


class _Tail:
    """Of all logs of a job, what was not printed yet."""

    def __init__(self, folder: Path, lines: int | None = None) -> None:
        self._folder, self._read = folder, dict[Path, int]()
        if lines is not None:
            self._skip(lines)

    def _skip(self, lines: int) -> None:
        from windlass.tasks.launch.drive.state import logs_of

        for log in logs_of(self._folder):
            whole = log.read_bytes()
            self._read[log] = len(whole) - sum(map(len, whole.splitlines(keepends=True)[-lines:]))

    def print_new(self) -> None:
        from windlass.tasks.launch.drive.state import logs_of

        for log in logs_of(self._folder):
            with log.open("rb") as stream:
                stream.seek(self._read.get(log, 0))
                text = stream.read()
            self._read[log] = self._read.get(log, 0) + len(text)
            sys.stdout.write(text.decode(errors="replace"))
        sys.stdout.flush()


def cancel(name: str) -> int:
    from windlass.tasks.launch.drive.choose import driver_of

    record = _found(name)
    before = state_of(record)
    if before.is_final:
        print(f"{record.name} had ended: {before.state}")
        return 0
    mark = Path(record.folder) / CANCELLED
    with suppress(OSError):  # the folder may be gone; the job is not
        mark.touch()
    try:
        driver_of(record.scheduler).cancel(record)
    except Error:
        mark.unlink(missing_ok=True)
        raise
    _clean(record)
    print(f"{record.name} is cancelled")
    return 0


def forget(name: str) -> int:
    from windlass.tasks.launch import registry

    record = _found(name)
    if not state_of(record).is_final:
        raise BadInput(f"{record.name} has not ended; cancel it first")
    registry.forget(registry.jobs_directory(), record.name)
    print(f"{record.name} is no longer listed; its folder stays: {record.folder}")
    return 0
