"""The key-value store through which the ranks of one epoch find each other. Imports no torch."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Protocol

from windlass.runtime.parallel.group import GroupLost

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.001, 0.05


class RendezvousStore(Protocol):
    """Shared by the ranks of one epoch. A key is written once and stays."""

    def put(self, key: str, value: bytes) -> None: ...

    def take(self, key: str, timeout_seconds: float) -> bytes:
        """Blocks until another rank has put the key; raises GroupLost on timeout."""
        ...


class FolderStore:
    """For ranks of one machine: a file per key, in a private folder."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def put(self, key: str, value: bytes) -> None:
        """Atomic."""
        file = self._file(key)
        unfinished = file.with_name(f"{file.name}.{os.getpid()}")
        unfinished.write_bytes(value)
        unfinished.replace(file)

    def take(self, key: str, timeout_seconds: float) -> bytes:
        until, pause = time.monotonic() + timeout_seconds, FIRST_PAUSE_SECONDS
        while True:
            try:
                return self._file(key).read_bytes()
            except FileNotFoundError:
                if time.monotonic() > until:
                    raise GroupLost(f"no rank wrote the key {key!r} within {timeout_seconds:g} s") from None
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _file(self, key: str) -> Path:
        """Hexadecimal: file names must not contain slashes, keys may."""
        return self._folder / key.encode().hex()
