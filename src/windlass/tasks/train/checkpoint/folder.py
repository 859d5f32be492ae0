"""The directory of a run's checkpoints: `step-00000100` is complete; `.tmp` while it is written. No torch.

Nothing is changed under its final name: a new checkpoint is renamed last, an old one is renamed before it is removed.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from windlass.errors import BadInput
from windlass.model.formats.disk.atomic import sync_directory, write_errors

_STEP = re.compile(r"step-(\d{8,})")
_LEFT_OVER = re.compile(r"step-\d{8,}\.(tmp|old|gone)")
LOCK = ".lock"


def step_name(step: int) -> str:
    return f"step-{step:08}"


def step_of(name: str) -> int | None:
    found = _STEP.fullmatch(name)
    return int(found[1]) if found else None


def named_steps(folder: Path) -> list[int]:
    """Steps with a directory, in order."""
    if not folder.is_dir():
        return []
    steps = (step_of(path.name) for path in folder.iterdir() if path.is_dir())
    return sorted(step for step in steps if step is not None)


def temporary_path(folder: Path, step: int) -> Path:
    return folder / f"{step_name(step)}.tmp"


def create_temporary(folder: Path, step: int) -> Path:
    """An empty temporary directory."""
    path = temporary_path(folder, step)
    with write_errors(path, 0):
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    return path


def commit(folder: Path, step: int) -> Path:
    """Renames the temporary directory to its final name."""
    path, written = folder / step_name(step), temporary_path(folder, step)
    with write_errors(path, 0):
        sync_directory(written)
        if path.exists():  # saved before a rollback; restored if we are killed before the rename
            old = _renamed(path, "old")
        else:
            old = None
        written.rename(path)
        sync_directory(folder)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
    return path


def remove(path: Path) -> None:
    """Renames first, so that a partly removed checkpoint is never taken for complete."""
    shutil.rmtree(_renamed(path, "gone"), ignore_errors=True)


def _renamed(path: Path, ending: str) -> Path:
    other = path.with_name(f"{path.name}.{ending}")
    shutil.rmtree(other, ignore_errors=True)
    path.rename(other)
    sync_directory(path.parent)
    return other


def remove_leftovers(folder: Path) -> list[str]:
    """Removes what a killed run was writing or removing; returns the names."""
    if not folder.is_dir():
        return []
    found = sorted(path for path in folder.iterdir() if _LEFT_OVER.fullmatch(path.name))
    for path in found:
        whole = path.with_suffix("")
        if path.suffix == ".old" and not whole.exists():
            path.rename(whole)
        else:
            shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in found]


def to_remove(steps: Iterable[int], keep_last: int, milestone_every: int) -> list[int]:
    """All but the last `keep_last` and multiples of `milestone_every` (0: no milestones)."""
    ordered = sorted(steps)
    old = ordered[: max(len(ordered) - max(keep_last, 1), 0)]
    return [step for step in old if not milestone_every or step % milestone_every]


class FolderLock:
    """Only one run at a time writes to a folder. Released when the process dies; ignored on file systems without locks."""

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK
        with write_errors(path, 0):
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise BadInput(f"another run is writing to {folder}; wait for it, or choose another folder with --out") from None
        except OSError:
            return

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
