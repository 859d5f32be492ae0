"""A journal of finished work items, one JSON object per line, so that interrupted work can be resumed.

A record must be written after its data is on disk. Losing the last records only means redoing their work, so a damaged tail is
truncated; a journal of other work (a different fingerprint) is refused.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from windlass.errors import BadInput
from windlass.model.formats.disk.atomic import sync_directory, write_errors


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    fingerprint: dict[str, Any]
    version: int = 1


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    payload: Any = None


_HEADER, _RECORD = msgspec.json.Decoder(_Header), msgspec.json.Decoder(_Record)


class Journal:
    """`fingerprint`: everything the result depends on (settings, a digest of the source). JSON values only."""

    def __init__(self, path: Path, fingerprint: Mapping[str, Any]) -> None:
        self.path = path
        self._lock = Lock()
        self._records: dict[str, Any] = {}
        self._header = msgspec.json.decode(msgspec.json.encode(dict(fingerprint)))
        with write_errors(path, 0):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._lock_file()
            with write_errors(path, 0):
                self._load()
        except BaseException:
            self.close()
            raise

    def done(self, key: str) -> bool:
        return key in self._records

    def payload(self, key: str) -> Any:
        """Payload recorded with the key."""
        return self._records[key]

    def records(self) -> dict[str, Any]:
        """All keys with their payloads, in the order of their first record."""
        return dict(self._records)

    def record(self, key: str, payload: Any = None, sync: bool = True) -> None:
        """`sync=False`: call `sync()` later. A killed process loses nothing; a power failure may lose unsynced records."""
        line = msgspec.json.encode(_Record(key=key, payload=payload)) + b"\n"
        with self._lock, write_errors(self.path, len(line)):
            self._append(line)
            self._records[key] = payload
        if sync:
            self.sync()

    def forget(self, keys: Iterable[str]) -> None:
        """Drops records whose data is lost. If killed in between, more may be forgotten, which is only redone."""
        lost = set(keys) & self._records.keys()
        if not lost:
            return
        with self._lock, write_errors(self.path, 0):
            self._records = {key: payload for key, payload in self._records.items() if key not in lost}
            self._restart()
            for key, payload in self._records.items():
                self._append(msgspec.json.encode(_Record(key=key, payload=payload)) + b"\n")
        self.sync()

    def sync(self) -> None:
        with write_errors(self.path, 0):
            os.fdatasync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def remove(self) -> None:
        """Deletes the journal; the work is finished."""
        self.path.unlink(missing_ok=True)
        self.close()

    def _lock_file(self) -> None:
        """Excludes a second run in the same directory. Ignored on file systems without locks."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(
                f"another process is writing to {self.path.parent}; wait for it or use another output directory"
            ) from None
        except OSError:
            return

    def _load(self) -> None:
        """Reads the lines before the first damaged one and truncates the rest."""
        lines = self.path.read_bytes().split(b"\n")[:-1]  # an incomplete last line is dropped
        if not lines or not self._check_header(lines[0]):
            self._restart()
            return
        kept = len(lines[0]) + 1
        for line in lines[1:]:
            try:
                record = _RECORD.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                break
            self._records[record.key] = record.payload
            kept += len(line) + 1
        os.ftruncate(self._descriptor, kept)

    def _check_header(self, line: bytes) -> bool:
        """False: the header itself is incomplete or damaged, so the file is restarted."""
        try:
            found = _HEADER.decode(line).fingerprint
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        differing = sorted(key for key in found.keys() | self._header.keys() if found.get(key) != self._header.get(key))
        if differing:
            what = f"unfinished work with a different {', '.join(differing)}"
            raise BadInput(f"{self.path.parent} holds {what}; delete {self.path} to start over, or use another output directory")
        return True

    def _restart(self) -> None:
        os.ftruncate(self._descriptor, 0)
        self._append(msgspec.json.encode(_Header(fingerprint=self._header)) + b"\n")
        os.fsync(self._descriptor)
        sync_directory(self.path.parent)

    def _append(self, line: bytes) -> None:
        """One write call, so that a killed process leaves a complete line; on a full disk, a partial one that is truncated next time."""
        written = os.write(self._descriptor, line)
        if written < len(line):
            os.write(self._descriptor, line[written:])
