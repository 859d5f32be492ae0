"""A run's checkpoints: asynchronous, atomic, and loadable at any world size.

A save: (1) the state is copied to host memory, which training waits for; then in a thread: (2) all ranks write their part with DCP,
synced and with checksums; (3) parts on local disks are copied to the shared folder; (4) rank 0 writes the manifest, syncs and renames;
(5) old checkpoints are removed. If killed at any time, the last renamed checkpoint is complete. A full disk loses the checkpoint, but
does not stop the run. Knows nothing of models: the state is nested dictionaries of tensors and plain values.
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
    """Created by all ranks together, which also call `save`, `load` and `wait` together."""

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
        """`milestone_every`: multiples of it are kept forever. `local`: a disk of each node, written first. `notify`: called with messages."""
        self.folder, self.identity = folder, identity
        self._keep_last, self._milestone_every, self._local, self._notify = keep_last, milestone_every, local, notify
        self._ranks, self._copy = CheckpointGroup(), HostCopy()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.num_failed = 0
        """Failed saves."""
        self._lock = self._ranks.agree(self._prepare)
        if local is not None:  # we hold the lock, and no rank writes before all are here
            remove_unlisted(local)

    # --- saving

    def save(self, step: int, state: dict[str, Any], wait: bool = False) -> None:
        """Returns when the state is copied (`wait`: when it is saved). Waits for the previous save first."""
        self.wait()
        taken = self._copy.take(state)
        self._thread = threading.Thread(target=self._save, args=(step, taken), name=f"save-{step}", daemon=True)
        self._thread.start()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Waits for the current save. Raises programming errors; disk errors were reported with `notify`."""
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

    # --- existing checkpoints

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, in order."""
        return [step for step in folders.named_steps(self.folder) if self._is_complete(step)]

    def latest(self) -> int | None:
        return next((step for step in reversed(folders.named_steps(self.folder)) if self._is_complete(step)), None)

    def path(self, step: int) -> Path:
        return self.folder / folders.step_name(step)

    # --- loading

    def load(self, into: dict[str, Any], step: int | None = None) -> int:
        """Loads that step into `into`, in place; by default the last undamaged one. Returns the step."""
        self.wait()
        candidates = self._ranks.gather(self._candidates(step))[0]
        for candidate in candidates:
            try:
                self._ranks.agree(lambda step=candidate: self._check(step))
            except BadCheckpoint as error:
                if step is not None:
                    raise
                self._notify_once(f"skipping the checkpoint of step {candidate}: {error}")
                continue
            load_into(into, self.path(candidate), self._ranks)
            if read_manifest(self.path(candidate)).identity.data not in ("", self.identity.data):
                self._notify_once("the data differs from that of the checkpoint: sample numbers now refer to other samples")
            return candidate
        where = f"of step {step} " if step is not None else ""
        raise BadInput(f"{self.folder} has no checkpoint {where}to resume from; remove --resume to start from the beginning")

    # --- internals

    def _prepare(self) -> folders.FolderLock | None:
        if not self._ranks.first:
            return None
        lock = folders.FolderLock(self.folder)
        for name in folders.remove_leftovers(self.folder):
            self._notify(f"removing {name}, which an earlier run did not finish")
        return lock

    def _notify_once(self, text: str) -> None:
        if self._ranks.first:
            self._notify(text)

    def _save(self, step: int, state: dict[str, Any]) -> None:
        try:
            self._write(step, state)
        except (Error, OSError, CheckpointException) as error:
            self.num_failed += 1
            self._discard(step)
            reason = _disk_error(error)
            if reason is None:
                self._failure = _first(error)
            else:
                self._notify_once(f"the checkpoint of step {step} could not be saved, training continues: {reason}")
        except BaseException as error:  # noqa: BLE001 - raised again by wait(), in the training thread
            self._failure = error

    def _write(self, step: int, state: dict[str, Any]) -> None:
        ranks, final = self._ranks, self.folder
        ranks.agree(lambda: folders.create_temporary(final, step) if ranks.first else None)
        place = folders.temporary_path(self._local or final, step)
        writer = CheckedWriter(place)
        with warnings.catch_warnings():  # DCP warns about a single process without a group
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
        """Removes an incomplete checkpoint; a complete part on a local disk stays for `consolidate`."""
        if self._ranks.first:
            shutil.rmtree(folders.temporary_path(self.folder, step), ignore_errors=True)
        if self._local is not None:
            place = folders.temporary_path(self._local, step)
            if not (place / parts_name(self._ranks.rank)).exists():
                shutil.rmtree(place, ignore_errors=True)

    def _is_complete(self, step: int) -> bool:
        try:
            check_sizes(self.path(step), read_manifest(self.path(step)))
        except BadCheckpoint:
            return False
        return True

    def _candidates(self, step: int | None) -> list[int]:
        named = folders.named_steps(self.folder)
        return named[::-1] if step is None else [found for found in named if found == step]

    def _check(self, step: int) -> None:
        """Verifies every file; each is read by one rank."""
        path = self.path(step)
        manifest = read_manifest(path)
        check_model(path, manifest.identity, self.identity)
        check_sizes(path, manifest)
        check_files(path, manifest, sorted(manifest.files)[self._ranks.rank :: self._ranks.size])


def _first(error: BaseException) -> BaseException:
    """DCP wraps the errors of ranks in a BaseException."""
    return next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error


def _disk_error(error: BaseException) -> str | None:
    """A disk or network error in one line; None: a programming error."""
    if isinstance(error, CheckpointException):
        reasons = [_disk_error(failure[0]) for failure in error.failures.values()]
        return next((reason for reason in reasons if reason is not None), None)
    if isinstance(error, OSError):
        return f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
    return str(error) if isinstance(error, Error) else None
