"""A worker's on-disk cache of weights: pieces of checkpoints, verified on arrival, within a size limit. No torch.

One folder per checkpoint, by its key. A piece is written to a temporary name and renamed, so a crash at any moment leaves only complete
pieces, and the next epoch requests the rest. Pieces are not fsynced one by one, which would slow down the transfer; after a reboot they are
verified again. Folders in use are locked; others are evicted, least recently used first.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.errors import BadCheckpoint, DoesNotFit
from windlass.model.formats.disk.atomic import write_errors
from windlass.runtime.machine.system import this_system
from windlass.runtime.weights.tensors.slices import Slice, overlap, subtract
from windlass.runtime.weights.transfer.pieces import (
    CATALOGUE,
    SUFFIX,
    Catalogue,
    CheckpointPiece,
    LocatedSlice,
    TensorHeader,
    is_intact,
    piece_file,
    piece_files,
    read_piece,
    slices_in_file,
)
from windlass.units import format_bytes

LOCK, BOOT, USED = ".lock", ".boot", ".used"
STALE_SECONDS = 3600.0
"""A temporary file this old was left by a crash: a piece is two megabytes."""
_numbers = count()


class WeightCache:
    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        """`limit_bytes`: for all checkpoints together; None: as much as the disk has."""
        self.folder, self.limit_bytes = folder, limit_bytes

    def using(self, catalogue: Catalogue) -> CacheEntry:
        """Opens a checkpoint; it is not evicted until closed."""
        folder = self.folder / catalogue.key
        with write_errors(folder, 0):
            folder.mkdir(parents=True, exist_ok=True)
        return CacheEntry(self, folder, catalogue)

    def num_bytes(self) -> int:
        return sum(_folder_bytes(folder) for folder in self._folders())

    def free(self, num_bytes: int, keep: Path) -> int:
        """Evicts unused checkpoints, least recently used first, until so many bytes are free; returns how many were freed."""
        freed = 0
        for folder in sorted(self._folders(), key=_last_used):
            if freed >= num_bytes:
                break
            if folder != keep:
                freed += _remove(folder)
        return freed

    def _folders(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if (path / LOCK).exists()] if self.folder.is_dir() else []


class CacheEntry:
    """One checkpoint of the cache, with a shared lock. For one thread at a time; other processes may open it too."""

    def __init__(self, cache: WeightCache, folder: Path, catalogue: Catalogue) -> None:
        self._cache, self.folder = cache, folder
        self._lock = _lock_shared(folder)
        try:
            self._tensors = self._write_catalogue(catalogue)
            self._held: dict[str, list[LocatedSlice]] = {}
            self._files: set[str] = set()
            _remove_stale(folder)
            self._check_after_boot()
            self._scan()
            (folder / USED).touch()
        except BaseException:
            self.close()
            raise

    def missing(self, wanted: Sequence[Slice]) -> list[Slice]:
        """The parts that are not cached, each element once."""
        self._scan()
        held = {name: [one.part for one in found] for name, found in self._held.items()}
        return [left for one in wanted for left in subtract([one], held.get(one.name, ()))]

    def num_bytes(self, slices: Iterable[Slice]) -> int:
        return sum(self._header(one).num_bytes(one) for one in slices)

    def make_room(self, wanted: Sequence[Slice]) -> None:
        """For the missing parts of these. Raises DoesNotFit."""
        needed = self.num_bytes(self.missing(wanted))
        limit = self._cache.limit_bytes
        over = self._cache.num_bytes() + needed - limit if limit is not None else 0
        over = max(over, needed - shutil.disk_usage(self.folder).free)
        if over > 0:
            over -= self._cache.free(over, self.folder)
        if over > 0:
            over -= self._drop_unneeded(wanted)
        if over > 0:
            allowed = f"{format_bytes(limit)} (--cache-size)" if limit is not None else "what the disk has free"
            raise DoesNotFit(
                f"{format_bytes(needed)} of weights do not fit in {self._cache.folder}: {format_bytes(over)} more than {allowed}; "
                "free space, raise --cache-size, or copy the checkpoint to this machine (--model-dir)",
                over,
            )

    def keep(self, piece: CheckpointPiece) -> None:
        """Returns when it is written."""
        if not is_intact(piece):
            raise BadCheckpoint("the checksum of a received piece is wrong; retry", tensor=_first(piece))
        size = sum(self._header(one).num_bytes(one) for one in piece.slices)
        if size != len(piece.data) or not all(self._header(one).holds(one) for one in piece.slices):
            raise BadCheckpoint("a piece does not fit the tensors of its checkpoint", tensor=_first(piece))
        _write(self.folder / piece.file_name, piece_file(piece))
        self._add(self.folder / piece.file_name)

    def store(self, wanted: Sequence[Slice]) -> str:
        """The folder that ranks open (runtime/weights/transfer/store.py), once nothing is missing."""
        missing = self.missing(wanted)
        if missing:
            left = format_bytes(self.num_bytes(missing))
            raise BadCheckpoint(
                f"{left} of the requested weights were not received, this tensor among them", self.folder, missing[0].name
            )
        (self.folder / USED).touch()
        return str(self.folder)

    def close(self) -> None:
        """May be called twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> CacheEntry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_catalogue(self, catalogue: Catalogue) -> dict[str, TensorHeader]:
        file, content = self.folder / CATALOGUE, msgspec.msgpack.encode(catalogue)
        if not file.exists() or file.read_bytes() != content:
            _write(file, (content,))
        return catalogue.by_name()

    def _check_after_boot(self) -> None:
        """Pieces that were not flushed when the machine went down may be damaged."""
        boot, file = this_system().boot_id, self.folder / BOOT
        if not file.exists() or file.read_text() != boot:
            for piece in list(piece_files(self.folder)):
                if not _is_intact(piece):
                    piece.unlink(missing_ok=True)
            file.write_text(boot)

    def _scan(self) -> None:
        """Picks up new pieces, perhaps written by another process."""
        for file in piece_files(self.folder):
            if file.name not in self._files:
                self._add(file)

    def _add(self, file: Path) -> None:
        self._files.add(file.name)
        for held in slices_in_file(file, self._tensors) or ():
            self._held.setdefault(held.part.name, []).append(held)

    def _header(self, one: Slice) -> TensorHeader:
        if one.name not in self._tensors:
            raise BadCheckpoint("the checkpoint has no such tensor", self.folder, one.name)
        return self._tensors[one.name]

    def _drop_unneeded(self, wanted: Sequence[Slice]) -> int:
        """Removes pieces that are not needed, unless another process uses the checkpoint; returns the bytes freed."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return 0
        try:
            useful = {held.file.name for one in wanted for held in self._held.get(one.name, ()) if overlap(held.part, one)}
            freed = 0
            for file in [self.folder / name for name in self._files - useful]:
                freed += file.stat().st_size
                file.unlink()
            self._files &= useful
            self._held = {name: [one for one in found if one.file.name in useful] for name, found in self._held.items()}
            return freed
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_SH)


def _write(file: Path, parts: tuple[bytes, ...]) -> None:
    """Atomic: to a unique temporary name, then renamed; others may be writing the same file."""
    part = file.with_name(f".{os.getpid()}-{next(_numbers)}.part")
    try:
        with write_errors(file.parent, sum(map(len, parts))):
            with part.open("wb") as stream:
                stream.writelines(parts)
            part.replace(file)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _remove_stale(folder: Path) -> None:
    """Temporary files left by a killed process."""
    for file in folder.glob(".*.part"):
        with suppress(FileNotFoundError):
            if time.time() - file.stat().st_mtime > STALE_SECONDS:
                file.unlink()


def _lock_shared(folder: Path) -> int:
    """A shared lock; eviction takes it exclusively. Retries if the folder was evicted meanwhile."""
    while True:
        with write_errors(folder, 0):
            folder.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                continue
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)


def _remove(folder: Path) -> int:
    """Returns the bytes freed; 0: it is in use."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size = _folder_bytes(folder)
        shutil.rmtree(folder, ignore_errors=True)
        return size
    except OSError:
        return 0
    finally:
        os.close(descriptor)


def _folder_bytes(folder: Path) -> int:
    total = 0
    for entry in os.scandir(folder):
        if entry.name.endswith(SUFFIX):
            total += entry.stat().st_size
    return total


def _last_used(folder: Path) -> float:
    file = folder / USED
    return file.stat().st_mtime if file.exists() else 0.0


def _is_intact(file: Path) -> bool:
    try:
        return is_intact(read_piece(file))
    except DECODE_ERRORS:
        return False


def _first(piece: CheckpointPiece) -> str:
    return piece.slices[0].name if piece.slices else ""
