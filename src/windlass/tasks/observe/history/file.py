"""The history in one file that only grows until it is written anew: a crash loses the record that was being written.

A record is a kind, a length and its bytes. `S`: the next series, by number. `V`: a time, and the values that changed since the record
before; every other series that has not ended has the value it had. So a quiet machine writes little: about a megabyte a day for 100 series.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.core.metrics.exposition import Labels
from windlass.tasks.observe.history.series import DAY_SECONDS, SeriesStore, is_end

MAGIC = b"windlass history 1\n"
MAX_BYTES = 6 * 2**20
"""Beyond this it is written anew, thinned."""
_HEAD = struct.Struct("<cI")
_TIME = struct.Struct("<d")
_VALUE = struct.Struct("<Id")
Key = tuple[str, Labels]
WriteFile = Callable[[Path, bytes], None]


class HistoryFile:
    """Failing to write never stops anything: `num_lost` counts. `write` replaces a file as a whole (model/formats/disk/atomic.py)."""

    def __init__(self, path: Path, write: WriteFile, max_bytes: int = MAX_BYTES) -> None:
        self._path, self._write_file, self._max_bytes = path, write, max_bytes
        self._numbers: dict[Key, int] = {}
        self._last: dict[int, bytes] = {}
        self._stream: IO[bytes] | None = None
        self.num_lost = 0

    def load(self, now: float) -> SeriesStore:
        """What the file has of the last day. A file that is not ours, or damaged, is begun anew."""
        store = read_history(self._path, now)
        for name, labels, series in list(store.all()):  # nobody knows what they were while nothing ran
            store.end(name, labels, series.times[-1] + 0.001)
        self._rewrite(store)
        return store

    def append(self, store: SeriesStore, time: float) -> None:
        """The samples of this time."""
        records: list[bytes] = []
        values: list[bytes] = []
        for name, labels, series in store.all():
            if series.times and series.times[-1] == time:
                number, record = self._number((name, labels))
                records.append(record)
                packed = _VALUE.pack(number, series.values[-1])
                if self._last.get(number) != packed:
                    self._last[number] = packed
                    values.append(packed)
        body = _TIME.pack(time) + b"".join(values)
        self._write(b"".join(records) + _HEAD.pack(b"V", len(body)) + body)
        if self._size() > self._max_bytes:
            store.thin(time + 60.0)
            self._rewrite(store)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _size(self) -> int:
        return self._stream.tell() if self._stream is not None else 0

    def _number(self, key: Key) -> tuple[int, bytes]:
        """And the record of a series that is new."""
        if key in self._numbers:
            return self._numbers[key], b""
        number = self._numbers[key] = len(self._numbers)
        body = msgspec.json.encode(key)
        return number, _HEAD.pack(b"S", len(body)) + body

    def _write(self, record: bytes) -> None:
        try:
            if self._stream is None:
                self._stream = self._path.open("ab", buffering=0)
            self._stream.write(record)
        except OSError:
            self.num_lost += 1

    def _rewrite(self, store: SeriesStore) -> None:
        self.close()
        self._numbers, self._last = {}, {}
        content = b"".join([MAGIC, *self._records(store)])
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._write_file(self._path, content)
            os.chmod(self._path, 0o600)  # noqa: PTH101 - names of models and keys
        except Exception:  # noqa: BLE001 - a full disk, a folder that is not ours: the history is then in memory only
            self.num_lost += 1

    def _records(self, store: SeriesStore) -> Iterator[bytes]:
        by_time: dict[float, list[tuple[int, float]]] = {}
        for name, labels, series in store.all():
            number, record = self._number((name, labels))
            yield record
            for time, value in zip(series.times, series.values, strict=True):
                by_time.setdefault(time, []).append((number, value))
        for time in sorted(by_time):
            body = _TIME.pack(time) + b"".join(self._changed(number, value) for number, value in by_time[time])
            yield _HEAD.pack(b"V", len(body)) + body

    def _changed(self, number: int, value: float) -> bytes:
        packed = _VALUE.pack(number, value)
        if self._last.get(number) == packed:
            return b""
        self._last[number] = packed
        return packed


def read_history(path: Path, now: float) -> SeriesStore:
    """What a file has of the last day; nothing is changed."""
    store = SeriesStore()
    try:
        content = path.read_bytes()
    except OSError:
        content = b""
    for key, time, value in _samples(content):
        if now - DAY_SECONDS <= time <= now:
            store.add(*key, time, value)
    return store


def _samples(content: bytes) -> Iterator[tuple[Key, float, float]]:
    keys: list[Key] = []
    current: dict[int, float] = {}
    for kind, body in _read_records(content):
        if kind == b"S":
            try:
                name, labels = msgspec.json.decode(body, type=tuple[str, Labels])
            except DECODE_ERRORS:  # damaged from here on
                return
            keys.append((name, labels))
            continue
        (time,) = _TIME.unpack_from(body)
        current.update(_VALUE.iter_unpack(body[_TIME.size :]))
        for number, value in list(current.items()):
            if number < len(keys):
                yield keys[number], time, value
            if is_end(value):
                del current[number]


def _read_records(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Up to the first that is not whole."""
    at = len(MAGIC)
    while content.startswith(MAGIC) and at + _HEAD.size <= len(content):
        kind, length = _HEAD.unpack_from(content, at)
        at += _HEAD.size
        body = content[at : at + length]
        is_whole = len(body) == length and (kind == b"S" or (kind == b"V" and (length - _TIME.size) % _VALUE.size == 0))
        if not is_whole:
            return
        yield kind, body
        at += length
