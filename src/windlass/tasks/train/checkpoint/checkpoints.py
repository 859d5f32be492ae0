"""A run's checkpoints: asynchronous, atomic, and loadable at any world size.

A save: (1) the state is copied to host memory, which training waits for; then in a thread: (2) all ranks write their part with DCP,
synced and with checksums; (3) parts on local disks are copied to the shared folder; (4) rank 0 writes the manifest, syncs and renames;
(5) old checkpoints are removed. If killed at any time, the last renamed checkpoint is complete. What cannot be written is written to the
fallback folder, if there is one. A save that fails does not stop the run: `failure` says why. Knows nothing of models: the state is
nested dictionaries of tensors and plain values.
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
from windlass.tasks.train.checkpoint import folder as folders
from windlass.tasks.train.checkpoint.failures import disk_error, first_cause
from windlass.tasks.train.checkpoint.gathering import (
    RankFiles,
    copy_to_shared,
    parts_name,
    remove_older,
    remove_parts,
    remove_unlisted,
    write_parts,
)
from windlass.tasks.train.checkpoint.host_copy import HostCopy
from windlass.tasks.train.checkpoint.loading import load_into
from windlass.tasks.train.checkpoint.manifest import (
    CheckpointFile,
    CheckpointIdentity,
    CheckpointManifest,
    check_files,
    check_model,
    check_sizes,
    is_complete,
    read_manifest,
    write_manifest,
)
from windlass.tasks.train.checkpoint.ranks import CheckpointGroup
from windlass.tasks.train.checkpoint.storage import CheckedWriter

Notify = Callable[[str], None]


class Checkpoints:
    """Created by all ranks together, which also call `save`, `load` and `wait` together."""

    def __init__(
        self,
        folder: Path,
        identity: CheckpointIdentity,
        *,
        keep_last: int = 3,
        milestone_every: int = 0,
        local: Path | None = None,
        fallback: Path | None = None,
        notify: Notify = warnings.warn,
    ) -> None:
        """`milestone_every`: multiples of it are kept forever. `local`: a disk of each node, written first. `fallback`: a second folder, on
        another disk, for what cannot be written to `folder`. `notify`: called with messages."""
        self.folder, self.fallback, self.identity = folder, fallback, identity
        self._folders = [folder] if fallback is None else [folder, fallback]
        self._keep_last, self._milestone_every, self._local, self._notify = keep_last, milestone_every, local, notify
        self._ranks, self._copy = CheckpointGroup(), HostCopy()
        self._thread: threading.Thread | None = None
        self._mistake: BaseException | None = None
        """A programming error of the saving thread."""
        self.num_failed = 0
        """Failed saves."""
        self.failure = ""
        """Why the last save failed; empty: it did not."""
        self._locks = self._ranks.agree(self._prepare)
        if local is not None:  # we hold the lock, and no rank writes before all are here
            remove_unlisted(local)

    # --- saving

    def save(self, step: int, state: dict[str, Any], wait: bool = False, goes_on: bool = True) -> None:
        """Returns when the state is copied (`wait`: when it is saved). Waits for the previous save first.

        `goes_on`: a failure is told with `notify`; else the caller tells of it."""
        self.wait()
        taken = self._copy.take(state)
        self._thread = threading.Thread(target=self._save, args=(step, taken, goes_on), name=f"save-{step}", daemon=True)
        self._thread.start()
        if wait:
            self.wait()

    @property
    def is_saving(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Waits for the current save. Raises programming errors; of others `failure` tells."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        mistake, self._mistake = self._mistake, None
        if mistake is not None:
            raise mistake

    def close(self) -> None:
        try:
            self.wait()
        finally:
            for lock in self._locks:
                lock.release()
            self._ranks.close()

    # --- existing checkpoints

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, in order."""
        return sorted({step for step, path in self._named() if is_complete(path)})

    def latest(self) -> int | None:
        return next((step for step, path in self._named() if is_complete(path)), None)

    def path(self, step: int) -> Path:
        """Of the complete checkpoint, if there is one."""
        paths = [folder / folders.step_name(step) for folder in self._folders]
        return next((path for path in paths if is_complete(path)), paths[0])

    # --- loading

    def load(self, into: dict[str, Any], step: int | None = None) -> int:
        """Loads that step into `into`, in place; by default the last undamaged one. Returns the step."""
        self.wait()
        candidates = self._ranks.gather([found for found in self._named() if step in (None, found[0])])[0]
        for number, path in candidates:
            try:
                self._ranks.agree(lambda path=path: self._check(path))
            except BadCheckpoint as error:
                if step is not None:
                    raise
                self._notify_once(f"skipping the checkpoint of step {number}: {error}")
                continue
            load_into(into, path, self._ranks)
            if read_manifest(path).identity.data not in ("", self.identity.data):
                self._notify_once("the data differs from that of the checkpoint: sample numbers now refer to other samples")
            return number
        where = f"of step {step} " if step is not None else ""
        places = " and ".join(map(str, self._folders))
        raise BadInput(f"{places} has no checkpoint {where}to resume from; remove --resume to start from the beginning")

    # --- internals

    def _prepare(self) -> list[folders.FolderLock]:
        locks: list[folders.FolderLock] = []
        for folder in self._folders if self._ranks.first else ():
            locks.append(folders.FolderLock(folder))
            for name in folders.remove_leftovers(folder):
                self._notify(f"removing {name}, which an earlier run did not finish")
        return locks

    def _named(self) -> list[tuple[int, Path]]:
        """Every folder that is named like a checkpoint, newest first; of equal steps that of the first folder."""
        named = [(step, folder / folders.step_name(step)) for folder in self._folders for step in folders.named_steps(folder)]
        return sorted(named, key=lambda found: -found[0])

    def _notify_once(self, text: str) -> None:
        if self._ranks.first:
            self._notify(text)

    def _save(self, step: int, state: dict[str, Any], goes_on: bool) -> None:
        self.failure = ""
        try:
            reason = self._try(step, state, self.folder, self._local)
            if reason is None:
                return
            if self.fallback is not None:
                again = self._try(step, state, self.fallback, None)
                if again is None:
                    self._notify_once(
                        f"the checkpoint of step {step} is in {self.fallback}, since it could not be saved in {self.folder}: {reason}"
                    )
                    return
                reason = f"{self.folder}: {reason}; {self.fallback}: {again}"
        except BaseException as error:  # noqa: BLE001 - raised again by wait(), in the training thread
            self._mistake = error
            return
        self.num_failed += 1
        self.failure = reason
        if goes_on:
            self._notify_once(f"the checkpoint of step {step} could not be saved, training continues: {reason}")

    def _try(self, step: int, state: dict[str, Any], folder: Path, local: Path | None) -> str | None:
        """Saves into one folder. Returns why that failed, if it was the disk or the network."""
        try:
            self._write(step, state, folder, local)
        except (Error, OSError, CheckpointException) as error:
            self._discard(step, folder, local)
            reason = disk_error(error)
            if reason is None:
                raise first_cause(error) from None
            return reason
        return None

    def _write(self, step: int, state: dict[str, Any], folder: Path, local: Path | None) -> None:
        ranks = self._ranks
        ranks.agree(lambda: folders.create_temporary(folder, step) if ranks.first else None)
        place = folders.temporary_path(local or folder, step)
        writer = CheckedWriter(place)
        with warnings.catch_warnings():  # DCP warns about a single process without a group
            warnings.simplefilter("ignore")
            dcp.save(state, storage_writer=writer, process_group=ranks.group, no_dist=ranks.group is None)
        files: dict[str, CheckpointFile] = {}
        for written in ranks.gather(writer.written):
            files |= written
        if local is not None:
            parts = RankFiles(identity=self.identity, step=step, rank=ranks.rank, world_size=ranks.size, files=writer.written)
            ranks.agree(lambda: write_parts(place, parts))
            remove_older(local, parts)
            ranks.agree(lambda: copy_to_shared(place, folders.temporary_path(folder, step), parts.files))
        ranks.agree(lambda: self._finish(step, folder, files))
        if local is not None:
            remove_parts(place, ranks.rank, writer.written)

    def _finish(self, step: int, folder: Path, files: dict[str, CheckpointFile]) -> None:
        if not self._ranks.first:
            return
        manifest = CheckpointManifest(identity=self.identity, step=step, world_size=self._ranks.size, files=files)
        write_manifest(folders.temporary_path(folder, step), manifest)
        kept = folders.commit(folder, step)
        try:
            self._remove_old(kept, step)
        except OSError as error:  # the checkpoint is there all the same
            self._notify(f"old checkpoints could not be removed: {disk_error(error)}")

    def _remove_old(self, kept: Path, step: int) -> None:
        old = folders.to_remove(self.steps(), self._keep_last, self._milestone_every)
        for number, path in self._named():
            if number in old or (number == step and path != kept):  # of the same step: saved before a rollback
                folders.remove(path)

    def _discard(self, step: int, folder: Path, local: Path | None) -> None:
        """Removes an incomplete checkpoint; a complete part on a local disk stays for `consolidate`."""
        if self._ranks.first:
            shutil.rmtree(folders.temporary_path(folder, step), ignore_errors=True)
        if local is not None:
            place = folders.temporary_path(local, step)
            if not (place / parts_name(self._ranks.rank)).exists():
                shutil.rmtree(place, ignore_errors=True)

    def _check(self, path: Path) -> None:
        """Verifies every file; each is read by one rank."""
        manifest = read_manifest(path)
        check_model(path, manifest.identity, self.identity)
        check_sizes(path, manifest)
        check_files(path, manifest, sorted(manifest.files)[self._ranks.rank :: self._ranks.size])
