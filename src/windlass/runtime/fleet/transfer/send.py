"""The root's side of weight transfer: which slices each rank needs, and reading them in pieces as fast as the worker takes them.

Memory: a few pieces per worker, whatever the size of the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from windlass.core.ranks.epoch import EpochPlan
from windlass.core.scheme import Scheme
from windlass.runtime.fleet.transfer.needed import needed, placement_of
from windlass.runtime.weights.load.prefetch import prefetch
from windlass.runtime.weights.tensors.slices import Slice
from windlass.runtime.weights.transfer.fingerprint import identity
from windlass.runtime.weights.transfer.pieces import (
    PIECE_BYTES,
    PIECES_VERSION,
    Catalogue,
    CheckpointPiece,
    TensorHeader,
    catalogue_of,
    checksum,
)

READERS = 2
"""Pieces read ahead per worker."""

Progress = Callable[[int, int], None]
"""Bytes sent, and of how many."""


class CheckpointSender:
    """An open checkpoint. Several threads may read pieces at once."""

    def __init__(self, path: Path) -> None:
        from windlass.runtime.weights.source import open_model

        found = identity(path)
        self.path, self.fingerprint, self.key = path, found.fingerprint, f"{found.key}-{PIECES_VERSION}"
        self._opened = open_model(path)
        self.catalogue: Catalogue = catalogue_of(self._opened.store, self.key, self._opened.spec.name, self._opened.kind)
        self._tensors = self.catalogue.by_name()

    def needed(self, plan: EpochPlan, rank: int) -> list[Slice]:
        placement = placement_of(self._opened, plan.layout, plan.shares, plan.stages, self._stored)
        return needed(self._opened, placement, plan.layout, rank)

    @cached_property
    def _stored(self) -> Scheme:
        """Cached: with a hundred thousand tensors it takes seconds."""
        from windlass.runtime.weights.schemes import cutting_scheme

        return cutting_scheme(self._opened)

    def num_bytes(self, slices: Iterable[Slice]) -> int:
        return sum(self._tensors[one.name].num_bytes(one) for one in slices)

    def pieces(self, slices: Sequence[Slice]) -> Iterator[CheckpointPiece]:
        """Of at most PIECE_BYTES each, read ahead."""
        jobs = [partial(self._read, group) for group in grouped(slices, self._tensors)]
        return prefetch(jobs, READERS)

    def close(self) -> None:
        self._opened.store.close()

    def _read(self, slices: tuple[Slice, ...]) -> CheckpointPiece:
        data = b"".join(stored_bytes(self._opened.store, self._tensors[one.name], one) for one in slices)
        return CheckpointPiece(slices=slices, data=data, checksum=checksum(slices, data))


async def send(
    sending: CheckpointSender, slices: Sequence[Slice], write: Callable[[CheckpointPiece], Awaitable[None]], progress: Progress
) -> None:
    """Sends one worker's slices; `write` waits while the link is full."""
    done, total = 0, sending.num_bytes(slices)
    progress(0, total)
    pieces = sending.pieces(slices)
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        await write(piece)
        done += len(piece.data)
        progress(done, total)


def grouped(slices: Iterable[Slice], tensors: dict[str, TensorHeader]) -> Iterator[tuple[Slice, ...]]:
    """Small slices together, large ones in runs of rows: at most PIECE_BYTES, or one row."""
    group: list[Slice] = []
    size = 0
    for one in slices:
        for part in _cut(one, tensors[one.name]):
            num_bytes = tensors[one.name].num_bytes(part)
            if group and size + num_bytes > PIECE_BYTES:
                yield tuple(group)
                group, size = [], 0
            group.append(part)
            size += num_bytes
    if group:
        yield tuple(group)


def _cut(one: Slice, header: TensorHeader) -> Iterator[Slice]:
    row_bytes = max(header.num_bytes(one) // one.num_rows, 1)
    step = max(PIECE_BYTES // row_bytes, 1)
    for start in range(*one.rows, step):
        yield Slice(name=one.name, rows=(start, min(start + step, one.rows[1])), columns=one.columns)


def stored_bytes(store: Any, header: TensorHeader, one: Slice) -> bytes:
    """As the checkpoint stores them; vectors of block formats as plain numbers."""
    import numpy as np

    first, last = one.rows[0] * header.fold, one.rows[1] * header.fold
    rows = np.empty((one.num_rows, header.row_bytes), dtype=np.uint8)
    if header.block_type and len(header.shape) > 1:
        rows = np.frombuffer(store.raw_blocks(one.name, first, last)[1], dtype=np.uint8).reshape(rows.shape)
    elif hasattr(store, "read_into"):
        store.read_into(one.name, one.rows[0] * header.row_bytes, rows.data.cast("B"))
    else:
        import torch

        rows = store.read(one.name, first, last).contiguous().view(torch.uint8).numpy().reshape(rows.shape)
    left, right = header.column_bytes(one.columns)
    return rows[:, left:right].tobytes()
