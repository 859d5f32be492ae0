"""What has been done, one JSON object a line, so that interrupted work goes on where it was. Knows nothing of the work.

A record must be written after the data it speaks of is on disk. Losing the last records only means doing their work again, so a
damaged tail is cut off; a first line that belongs to other work is refused.
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
from windlass.formats.disk.atomic import explained, sync_directory


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    fingerprint: dict[str, Any]
    version: int = 1


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    key: str
    payload: Any = None


_HEADER, _RECORD = msgspec.json.Decoder(_Header), msgspec.json.Decoder(_Record)


class Journal:
    """`fingerprint` is all that the result depends on: settings, and a digest of the source. JSON values only."""

    def __init__(self, path: Path, fingerprint: Mapping[str, Any]) -> None:
        self.path = path
        self._lock = Lock()
        self._records: dict[str, Any] = {}
        self._header = msgspec.json.decode(msgspec.json.encode(dict(fingerprint)))
        with explained(path, 0):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._lock_file()
            with explained(path, 0):
                self._load()
        except BaseException:
            self.close()
            raise

    def done(self, key: str) -> bool:
        return key in self._records

    def payload(self, key: str) -> Any:
        """What was recorded with the key."""
        return self._records[key]

    def records(self) -> dict[str, Any]:
        """All keys with their payloads, in the order of their first record."""
        return dict(self._records)

    def record(self, key: str, payload: Any = None, sync: bool = True) -> None:
        """`sync=False` leaves it to a later `sync()`; a killed process loses nothing by it, a machine without power may."""
        line = msgspec.json.encode(_Record(key=key, payload=payload)) + b"\n"
        with self._lock, explained(self.path, len(line)):
            self._append(line)
            self._records[key] = payload
        if sync:
            self.sync()

    def forget(self, keys: Iterable[str]) -> None:
        """What they speak of is gone, and will be done again. Killed within, it may forget more, which is only done again too."""
        lost = set(keys) & self._records.keys()
        if not lost:
            return
        with self._lock, explained(self.path, 0):
            self._records = {key: payload for key, payload in self._records.items() if key not in lost}
            self._start_anew()
            for key, payload in self._records.items():
                self._append(msgspec.json.encode(_Record(key=key, payload=payload)) + b"\n")
        self.sync()

    def sync(self) -> None:
        with explained(self.path, 0):
            os.fdatasync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def remove(self) -> None:
        """The work is finished."""
        self.path.unlink(missing_ok=True)
        self.close()

    def _lock_file(self) -> None:
        """Two runs into one directory would undo each other's work. A file system without locks is taken as it is."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(
                f"another process is writing to {self.path.parent}; wait for it or use another output directory"
            ) from None
        except OSError:
            return

    def _load(self) -> None:
        """Reads the whole lines before the first that is damaged, and cuts off the rest."""
        lines = self.path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is no line
        if not lines or not self._check_header(lines[0]):
            self._start_anew()
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
        """False: the file was interrupted as it was begun, or lost; nothing in it can be relied on."""
        try:
            found = _HEADER.decode(line).fingerprint
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return False
        differing = sorted(key for key in found.keys() | self._header.keys() if found.get(key) != self._header.get(key))
        if differing:
            what = f"unfinished work with another {', '.join(differing)}"
            raise BadInput(f"{self.path.parent} holds {what}; delete {self.path} to begin anew, or use another output directory")
        return True

    def _start_anew(self) -> None:
        os.ftruncate(self._descriptor, 0)
        self._append(msgspec.json.encode(_Header(fingerprint=self._header)) + b"\n")
        os.fsync(self._descriptor)
        sync_directory(self.path.parent)

    def _append(self, line: bytes) -> None:
        """One write, so that a killed process leaves the whole line or, on a full disk, a torn one that is cut off next time."""
        written = os.write(self._descriptor, line)
        if written < len(line):
            os.write(self._descriptor, line[written:])
