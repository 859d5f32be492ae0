"""A run's checkpoints: saved aside while training goes on, whole or not at all, and loaded at any world size.

A save in order: (1) the state is copied to host memory, which training waits for; in a thread: (2) all ranks write their part with
DCP, synced, with checksums; (3) parts on local disks are brought to the shared folder; (4) the first rank writes the manifest,
syncs and renames; (5) old ones are removed. Killed anywhere, the last one with a name is whole. A disk that is full costs the
checkpoint, not the run. Knows nothing of models: the state is nested dictionaries of tensors and plain values.
"""

from __future__ import annotations

import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from windlass.errors import BadCheckpoint, BadInput, Error
from windlass.train.checkpoint import folder as folders
from windlass.train.checkpoint.gathering import (
    RankFiles,
    copy_to_shared,
    parts_name,
    remove_older,
    remove_parts,
    remove_unlisted,
    write_parts,
)
from windlass.train.checkpoint.host_copy import HostCopy
from windlass.train.checkpoint.loading import load_into
from windlass.train.checkpoint.manifest import (
    CheckpointFile,
    CheckpointIdentity,
    CheckpointManifest,
    check_files,
    check_model,
    check_sizes,
    read_manifest,
    write_manifest,
)
from windlass.train.checkpoint.ranks import CheckpointGroup
from windlass.train.checkpoint.storage import CheckedWriter

Notify = Callable[[str], None]


class Checkpoints:
    """All ranks make it at the same time, and call `save`, `load` and `wait` together."""

    def __init__(
        self,
        folder: Path,
        identity: CheckpointIdentity,
        *,
        keep_last: int = 3,
        milestone_every: int = 0,
        local: Path | None = None,
        notify: Notify = warnings.warn,
    ) -> None:
        """`milestone_every`: steps that are kept for ever. `local`: a disk of each node that is written first. `notify`: for people."""
        self.folder, self.identity = folder, identity
        self._keep_last, self._milestone_every, self._local, self._notify = keep_last, milestone_every, local, notify
        self._ranks, self._copy = CheckpointGroup(), HostCopy()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.num_failed = 0
        """Saves that came to nothing."""
        self._lock = self._ranks.agree(self._prepare)
        if local is not None:  # the lock is ours, and none of us writes before all have come here
            remove_unlisted(local)

    # --- saving

    def save(self, step: int, state: dict[str, Any], wait: bool = False) -> None:
        """Returns when the state is copied (`wait`: when it is saved). One at a time: it first waits for the last."""
        self.wait()
        taken = self._copy.take(state)
        self._thread = threading.Thread(target=self._save, args=(step, taken), name=f"save-{step}", daemon=True)
        self._thread.start()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until nothing is being saved. A mistake of the program is raised here; what a disk did was said already."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        try:
            self.wait()
        finally:
            if self._lock is not None:
                self._lock.release()
            self._ranks.close()

    # --- what is there

    def steps(self) -> list[int]:
        """Steps whose checkpoint is there and has all its bytes, in order."""
        return [step for step in folders.named_steps(self.folder) if self._sound(step)]

    def latest(self) -> int | None:
        return next((step for step in reversed(folders.named_steps(self.folder)) if self._sound(step)), None)

    def path(self, step: int) -> Path:
        return self.folder / folders.step_name(step)

    # --- loading

    def load(self, into: dict[str, Any], step: int | None = None) -> int:
        """Fills `into` in place from that step, or from the last that is not damaged. Returns the step."""
        self.wait()
        wanted = self._ranks.gather(self._candidates(step))[0]
        for candidate in wanted:
            try:
                self._ranks.agree(lambda step=candidate: self._check(step))
            except BadCheckpoint as error:
                if step is not None:
                    raise
                self._say(f"the checkpoint of step {candidate} is left out: {error}")
                continue
            load_into(into, self.path(candidate), self._ranks)
            if read_manifest(self.path(candidate)).identity.data not in ("", self.identity.data):
                self._say("the data is not what the checkpoint was trained on: its sample numbers mean other samples now")
            return candidate
        where = f"of step {step} " if step is not None else ""
        raise BadInput(f"{self.folder} has no checkpoint {where}to go on from; leave --resume out to begin anew")

    # --- inside

    def _prepare(self) -> folders.FolderLock | None:
        if not self._ranks.first:
            return None
        lock = folders.FolderLock(self.folder)
        for name in folders.remove_leftovers(self.folder):
            self._notify(f"{name} was not finished when the last run ended, and is removed")
        return lock

    def _say(self, text: str) -> None:
        if self._ranks.first:
            self._notify(text)

    def _save(self, step: int, state: dict[str, Any]) -> None:
        try:
            self._write(step, state)
        except (Error, OSError, CheckpointException) as error:
            self.num_failed += 1
            self._discard(step)
            reason = _from_disk(error)
            if reason is None:
                self._failure = _first(error)
            else:
                self._say(f"the checkpoint of step {step} could not be saved, training goes on: {reason}")
        except BaseException as error:  # noqa: BLE001 - raised again by wait(), in the thread that trains
            self._failure = error

    def _write(self, step: int, state: dict[str, Any]) -> None:
        ranks, final = self._ranks, self.folder
        ranks.agree(lambda: folders.create_temporary(final, step) if ranks.first else None)
        place = folders.temporary_path(self._local or final, step)
        writer = CheckedWriter(place)
        with warnings.catch_warnings():  # of one process without a group, which DCP means well about
            warnings.simplefilter("ignore")
            dcp.save(state, storage_writer=writer, process_group=ranks.group, no_dist=ranks.group is None)
        files: dict[str, CheckpointFile] = {}
        for written in ranks.gather(writer.written):
            files |= written
        if self._local is not None:
            parts = RankFiles(identity=self.identity, step=step, rank=ranks.rank, world_size=ranks.size, files=writer.written)
            ranks.agree(lambda: write_parts(place, parts))
            remove_older(self._local, parts)
            ranks.agree(lambda: copy_to_shared(place, folders.temporary_path(final, step), parts.files))
        ranks.agree(lambda: self._finish(step, files))
        if self._local is not None:
            remove_parts(place, ranks.rank, writer.written)

    def _finish(self, step: int, files: dict[str, CheckpointFile]) -> None:
        if not self._ranks.first:
            return
        manifest = CheckpointManifest(identity=self.identity, step=step, world_size=self._ranks.size, files=files)
        write_manifest(folders.temporary_path(self.folder, step), manifest)
        folders.commit(self.folder, step)
        for old in folders.to_remove(self.steps(), self._keep_last, self._milestone_every):
            folders.remove(self.path(old))

    def _discard(self, step: int) -> None:
        """A part of a checkpoint is of no use and takes room; a part on a local disk that is whole there may still be brought here."""
        if self._ranks.first:
            shutil.rmtree(folders.temporary_path(self.folder, step), ignore_errors=True)
        if self._local is not None:
            place = folders.temporary_path(self._local, step)
            if not (place / parts_name(self._ranks.rank)).exists():
                shutil.rmtree(place, ignore_errors=True)

    def _sound(self, step: int) -> bool:
        try:
            check_sizes(self.path(step), read_manifest(self.path(step)))
        except BadCheckpoint:
            return False
        return True

    def _candidates(self, step: int | None) -> list[int]:
        named = folders.named_steps(self.folder)
        return named[::-1] if step is None else [found for found in named if found == step]

    def _check(self, step: int) -> None:
        """Every file is read once, each by one of the ranks."""
        path = self.path(step)
        manifest = read_manifest(path)
        check_model(path, manifest.identity, self.identity)
        check_sizes(path, manifest)
        check_files(path, manifest, sorted(manifest.files)[self._ranks.rank :: self._ranks.size])


def _first(error: BaseException) -> BaseException:
    """DCP wraps what went wrong on each rank in a BaseException, which nobody would catch."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _from_disk(error: BaseException) -> str | None:
    """In one line, what the disk (or the way to it) did; None: the mistake is ours."""
    if isinstance(error, CheckpointException):
        reasons = [_from_disk(failure[0]) for failure in error.failures.values()]
        return next((reason for reason in reasons if reason is not None), None)
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
    return str(error) if isinstance(error, Error) else None
