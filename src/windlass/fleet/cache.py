"""A worker's disk as a cache of weights: pieces of checkpoints by key, checked, whole or not there, within a size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.weights.pieces import Catalogue, Piece
from windlass.weights.slices import Slice

if TYPE_CHECKING:
    from types import TracebackType


class Cache:
    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes

    def using(self, key: str) -> Use:
        """A checkpoint that is in use: it is not removed to make room."""
        raise NotImplementedError


class Use:
    """One checkpoint of the cache, while somebody needs it. A context manager."""

    @property
    def catalogue(self) -> Catalogue | None:
        """None: it has not come yet."""
        raise NotImplementedError

    def keep_catalogue(self, catalogue: Catalogue) -> None:
        raise NotImplementedError

    def missing(self, wanted: Sequence[Slice]) -> list[Slice]:
        """What of it is not here; nothing of it is asked for twice."""
        raise NotImplementedError

    def make_room(self, wanted: Iterable[Slice]) -> None:
        """For what is missing of these: other checkpoints go, the least recently used first. DoesNotFit where it is not enough."""
        raise NotImplementedError

    def keep(self, piece: Piece) -> None:
        """Checked, and on disk under its name when this returns."""
        raise NotImplementedError

    def store(self, wanted: Sequence[Slice]) -> str:
        """The folder that a rank opens (RankJob.parts), now that nothing of what it reads is missing."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Use:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
