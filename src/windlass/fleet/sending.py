"""The root's side of weights that travel: which slices each rank needs, and those slices, read in pieces as fast as they are taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.weights.pieces import Catalogue, Piece
from windlass.weights.slices import Slice

if TYPE_CHECKING:
    from windlass.core.epoch import EpochPlan

SendingProgress = Callable[[str, int, int], None]
"""Node, bytes done, bytes of all."""


class Sending:
    """A checkpoint that is open for reading. Threads may read pieces of it at once."""

    def __init__(self, path: Path) -> None:
        raise NotImplementedError

    @property
    def key(self) -> str:
        """Of the checkpoint, as the workers' caches know it."""
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        """Of its contents: a worker's own files with the same are read instead."""
        raise NotImplementedError

    @property
    def catalogue(self) -> Catalogue:
        raise NotImplementedError

    def needed(self, plan: EpochPlan, rank: int) -> list[Slice]:
        raise NotImplementedError

    def num_bytes(self, slices: Sequence[Slice]) -> int:
        raise NotImplementedError

    def pieces(self, slices: Sequence[Slice]) -> Iterator[Piece]:
        """Of at most PIECE_BYTES, in the order of the files; one is read ahead."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
