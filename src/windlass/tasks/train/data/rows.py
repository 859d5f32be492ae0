"""Packs the documents of a source into rows of equal length. Every token is in exactly one row.

`cut`: the tokens of a shard are split every `length` tokens, across documents; the remainder at the end of a shard is dropped.
`whole`: a document that does not fit in the rest of a row starts the next one, and the rest is padded; only documents longer than a row
are split, and nothing is dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windlass.core.recipe.sections import Packing
from windlass.tasks.train.data.shards import OpenShard

Places = NDArray[np.int64]


class PackedRows:
    """All rows of a source's shards, by number."""

    def __init__(self, shards: list[OpenShard], length: int, packing: Packing) -> None:
        self.length = length
        self.shards = shards
        self._edges = [_cut(shard, length) if packing == "cut" else _whole(shard, length) for shard in shards]
        self._firsts = np.cumsum([0, *(_num_rows(edges) for edges in self._edges)])

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def locate(self, numbers: Places) -> tuple[Places, Places, Places]:
        """For each row: its shard, and its token range."""
        shards = np.searchsorted(self._firsts, numbers, side="right") - 1
        starts, stops = np.empty_like(numbers), np.empty_like(numbers)
        for shard in np.unique(shards):
            chosen = shards == shard
            own = numbers[chosen] - self._firsts[shard]
            edges = self._edges[shard]
            if isinstance(edges, int):
                starts[chosen], stops[chosen] = own * self.length, (own + 1) * self.length
            else:
                starts[chosen], stops[chosen] = edges[own], edges[own + 1]
        return shards, starts, stops


def _num_rows(edges: int | Places) -> int:
    return edges if isinstance(edges, int) else len(edges) - 1


def _cut(shard: OpenShard, length: int) -> int:
    return shard.shard.num_tokens // length


def _whole(shard: OpenShard, length: int) -> Places:
    """Start offsets of rows, and the end of the last."""
    begins = np.asarray(shard.documents, np.int64)
    if len(begins) < 2:
        return np.zeros(1, np.int64)
    # From each document, the first that no longer fits with it into one row; itself, if it is longer than a row.
    following = (np.searchsorted(begins, begins[:-1] + length, side="right") - 1).tolist()
    starts: list[int] = begins.tolist()
    edges, document, last = [0], 0, len(starts) - 1
    while document < last:
        if (after := following[document]) > document:
            edges.append(starts[after])
            document = after
            continue
        document = _through(starts, document, length, edges)
    return np.array(edges, np.int64)


def _through(starts: list[int], document: int, length: int, edges: list[int]) -> int:
    """Splits a document that is longer than a row; its last part shares a row with the following documents that fit."""
    place, stop = starts[document], starts[document + 1]
    while stop - place > length:
        place += length
        edges.append(place)
    document += 1
    while document + 1 < len(starts) and starts[document + 1] - place <= length:
        document += 1
    edges.append(starts[document])
    return document


class RowArrays(NamedTuple):
    """Arrays [rows, length]."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]
    positions: NDArray[np.int64]
    documents: NDArray[np.int32]


IGNORED = -100
"""A target without loss, as in PyTorch's cross-entropy."""


def gather(shard: OpenShard, starts: Places, stops: Places, length: int, filler: int) -> RowArrays:
    """The rows: tokens, next-token targets within a document, positions, and document indices."""
    window, inside = _windows(shard, starts, stops, length, filler)
    targets = np.where(inside, window[:, 1:], IGNORED)
    begins = np.zeros((len(starts), length), bool)
    rows, edges = _between(np.asarray(shard.documents), starts + 1, stops + 1)  # documents that begin in a row, or right after it
    targets[rows, edges - 1] = IGNORED
    begins[rows[edges < length], edges[edges < length]] = True
    short = np.nonzero(stops - starts < length)[0]
    begins[short, (stops - starts)[short]] = True  # padding is a separate document
    targets[~_learned(shard, starts, stops, length)] = IGNORED
    places = np.arange(length)
    since = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    return RowArrays(window[:, :-1], targets, places - since, begins.cumsum(axis=1, dtype=np.int32))


def _windows(
    shard: OpenShard, starts: Places, stops: Places, length: int, filler: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """[rows, length + 1]: one more token than a row, for the last target; and a mask of non-padding positions."""
    window = np.full((len(starts), length + 1), filler, np.int64)
    for row, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        piece = shard.read(start, stop + 1)
        window[row, : len(piece)] = piece
    shard.check_vocabulary(window)
    inside = np.arange(length) < (stops - starts)[:, None]
    window[:, :-1][~inside] = filler
    return window, inside


def _between(values: NDArray[np.uint64], starts: Places, stops: Places) -> tuple[Places, Places]:
    """Of sorted values, those in [start, stop) of each row: (row, value - start + 1)."""
    first = np.searchsorted(values, starts.astype(np.uint64), side="left")
    last = np.searchsorted(values, stops.astype(np.uint64), side="left")
    rows, indices = _spread(first, last)
    return rows, values[indices].astype(np.int64) - starts[rows] + 1


def _spread(first: Places, last: Places) -> tuple[Places, Places]:
    """Row 0's first, first + 1, ... up to its last, then row 1's: (row, index)."""
    counts = np.maximum(last - first, 0)
    rows = np.repeat(np.arange(len(first)), counts)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, first[rows] + within


def _learned(shard: OpenShard, starts: Places, stops: Places, length: int) -> NDArray[np.bool_]:
    """Whether the target of each position is trained on: the mask of the next token."""
    runs = shard.learned
    if runs is None:
        return np.ones((len(starts), length), bool)
    froms, tos = runs[:, 0], runs[:, 1]
    first = np.searchsorted(tos, (starts + 1).astype(np.uint64), side="right")
    last = np.searchsorted(froms, (stops + 1).astype(np.uint64), side="left")
    rows, indices = _spread(first, last)
    steps = np.zeros((len(starts), length + 1), np.int8)
    begin = froms[indices].astype(np.int64) - starts[rows] - 1
    end = tos[indices].astype(np.int64) - starts[rows] - 1
    steps[rows, np.maximum(begin, 0)] += 1  # runs do not touch, so no position occurs twice
    steps[rows, np.minimum(end, length)] -= 1
    return steps[:, :-1].cumsum(axis=1) > 0
