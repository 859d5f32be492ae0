"""Checkpoints on a worker's own disk: one with the same contents as the root's is read, and nothing is sent. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from windlass.errors import Error
from windlass.runtime.weights.files import weight_files
from windlass.runtime.weights.transfer.fingerprint import identity

MAX_DEPTH = 3
MAX_LOOKED_AT = 10_000
"""Folders; --model-dir may be the root of a disk."""


class LocalCheckpoints:
    """`folders` are searched a few levels deep. Fingerprints are cached while files do not change."""

    def __init__(self, folders: Iterable[Path] = ()) -> None:
        self._folders = tuple(folders)
        self._known: dict[Path, tuple[object, str]] = {}

    def find(self, fingerprint: str, path: str, num_bytes: int = 0) -> Path | None:
        """Tries the root's own path first. `num_bytes`: of the weight files; candidates of another size are skipped."""
        for candidate in self._candidates(Path(path)):
            state = _state(candidate)
            alike = state and num_bytes in (0, sum(size for _, size, _ in state))
            if alike and self._fingerprint(candidate, state) == fingerprint:
                return candidate
        return None

    def _fingerprint(self, path: Path, state: object) -> str:
        known = self._known.get(path)
        if known is None or known[0] != state:
            try:
                known = state, identity(path).fingerprint
            except (Error, OSError):
                known = state, ""
            self._known[path] = known
        return known[1]

    def _candidates(self, same: Path) -> Iterator[Path]:
        if same.is_absolute() and same.exists():
            yield same
        left = MAX_LOOKED_AT
        waiting = [(folder, 0) for folder in self._folders]
        while waiting and left:
            folder, depth = waiting.pop(0)
            left -= 1
            try:
                entries = sorted(folder.iterdir())
            except OSError:
                continue
            yield folder
            yield from (entry for entry in entries if entry.suffix in (".gguf", ".m") and entry.is_file())
            if depth < MAX_DEPTH:
                waiting += [(entry, depth + 1) for entry in entries if entry.is_dir() and not entry.name.startswith(".")]


def _state(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of its weight files; empty: none."""
    try:
        files = weight_files(path) if path.is_file() or path.is_dir() else []
        return tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    except OSError:
        return ()
