"""The jobs that were launched from this machine: one small file each, beside their folders. Knows no scheduler."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from windlass.errors import BadInput, UnknownName
from windlass.tasks.launch.drive.state import Record

WriteFile = Callable[[Path, bytes], None]


def jobs_directory(environment: Mapping[str, str] | None = None) -> Path:
    """$WINDLASS_JOBS, else ~/.windlass/jobs: home folders are shared on most clusters."""
    given = os.environ if environment is None else environment
    return Path(given["WINDLASS_JOBS"]) if given.get("WINDLASS_JOBS") else Path.home() / ".windlass" / "jobs"


def remember(directory: Path, record: Record, write: WriteFile) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    write(directory / f"{record.name}.json", msgspec.json.encode(record))


def all_jobs(directory: Path) -> list[Record]:
    """Newest first. A file that cannot be read is left out, not lost."""
    found: list[Record] = []
    for file in sorted(directory.glob("*.json")) if directory.is_dir() else []:
        with suppress(OSError, msgspec.ValidationError, msgspec.DecodeError):
            found.append(msgspec.json.decode(file.read_bytes(), type=Record))
    return sorted(found, key=lambda record: record.submitted, reverse=True)


def find_job(directory: Path, name: str) -> Record:
    """By its name, or by the scheduler's id."""
    jobs = all_jobs(directory)
    for record in jobs:
        if name in (record.name, record.id):
            return record
    if not jobs:
        raise BadInput(f"there is no job {name!r}: none was launched from this machine, or WINDLASS_JOBS names another folder")
    raise UnknownName("job", name, [record.name for record in jobs])


def new_name(directory: Path, wanted: str) -> str:
    """`wanted`, or with a number behind it if that is taken."""
    taken = {file.stem for file in directory.glob("*.json")} if directory.is_dir() else set[str]()
    taken |= {path.name for path in directory.iterdir() if path.is_dir()} if directory.is_dir() else set[str]()
    number, name = 1, wanted
    while name in taken:
        number += 1
        name = f"{wanted}-{number}"
    return name


def forget(directory: Path, name: str) -> None:
    (directory / f"{name}.json").unlink(missing_ok=True)
