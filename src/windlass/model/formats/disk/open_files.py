"""A thread-safe pool of open files: opened on first use, least recently used closed when there are too many."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from windlass.errors import BadCheckpoint

MAX_OPEN = 64
"""Well under the default limit of 1,024; a large checkpoint has 200 files."""


class _Open:
    def __init__(self, path: Path) -> None:
        # The path has been resolved; O_NOFOLLOW refuses a link that replaced it since.
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self.num_readers = 0


class OpenFiles:
    def __init__(self, limit: int = MAX_OPEN) -> None:
        self._limit = limit
        self._files: OrderedDict[Path, _Open] = OrderedDict()
        self._lock = Lock()

    @contextmanager
    def reading(self, path: Path) -> Generator[int]:
        """A descriptor for os.pread that stays open while in use."""
        with self._lock:
            file = self._take(path)
            file.num_readers += 1
        try:
            yield file.descriptor
        finally:
            with self._lock:
                file.num_readers -= 1
                self._close_idle(self._limit)

    def close(self) -> None:
        with self._lock:
            self._close_idle(0)

    def _take(self, path: Path) -> _Open:
        if path not in self._files:
            try:
                self._files[path] = _Open(path)
            except OSError as error:
                raise BadCheckpoint(f"cannot be opened: {error.strerror}", path) from None
        self._files.move_to_end(path)
        return self._files[path]

    def _close_idle(self, limit: int) -> None:
        for path, file in list(self._files.items()):
            if len(self._files) <= limit:
                return
            if file.num_readers == 0:
                os.close(self._files.pop(path).descriptor)
