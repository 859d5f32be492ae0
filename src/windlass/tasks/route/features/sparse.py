"""Counts in sparse rows (CSR), with the few products that fitting needs. numpy only: scipy would be a second dependency.

An entry takes five bytes, and products go through the entries in blocks: nothing as long as all of them is made on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK_ENTRIES = 1 << 16
MAX_COUNT = 255
TERM = (1.0 + np.log(np.maximum(np.arange(MAX_COUNT + 1), 1))).astype(np.float32)
"""The value of a count: the tenth occurrence of a word says less than the first (sublinear term frequency)."""


@dataclass(frozen=True, slots=True)
class Sparse:
    ends: NDArray[np.int64]
    """Row i has the entries from ends[i] to ends[i + 1]."""
    columns: NDArray[np.int32]
    counts: NDArray[np.uint8]
    num_columns: int

    def __len__(self) -> int:
        return len(self.ends) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Entries of every row."""
        return np.diff(self.ends)

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Rows, and their entries."""
        first = 0
        while first < len(self):
            last = int(np.searchsorted(self.ends, self.ends[first] + BLOCK_ENTRIES, side="right")) - 1
            last = max(last, first + 1)
            yield slice(first, last), slice(int(self.ends[first]), int(self.ends[last]))
            first = last

    def times(self, vector: NDArray[np.float32]) -> NDArray[np.float32]:
        found = np.zeros(len(self), dtype=np.float32)
        for rows, entries in self.blocks():
            found[rows] = self.row_sums(rows, TERM.take(self.counts[entries]) * vector.take(self.columns[entries]))
        return found

    def row_squares(self, by_column: NDArray[np.float32]) -> NDArray[np.float32]:
        """Squared lengths of the rows with their columns scaled."""
        found = np.zeros(len(self), dtype=np.float32)
        for rows, entries in self.blocks():
            scaled: NDArray[np.float32] = TERM.take(self.counts[entries]) * by_column.take(self.columns[entries])
            found[rows] = self.row_sums(rows, np.square(scaled))
        return found

    def transposed_times(self, vector: NDArray[np.float32]) -> NDArray[np.float32]:
        found = np.zeros(self.num_columns, dtype=np.float32)
        for rows, entries in self.blocks():
            spread = np.repeat(vector[rows], self.lengths[rows])
            spread *= TERM.take(self.counts[entries])
            found += np.bincount(self.columns[entries], weights=spread, minlength=self.num_columns)
        return found

    def row_sums(self, rows: slice, entries: NDArray[np.float32]) -> NDArray[np.float32]:
        """Of the entries of a block. `reduceat` takes an empty row's neighbour, so empty rows are left out."""
        starts = self.ends[rows] - self.ends[rows.start]
        is_full = self.lengths[rows] > 0
        found = np.zeros(len(starts), dtype=np.float32)
        if is_full.any():
            found[is_full] = np.add.reduceat(entries, starts[is_full])
        return found

    def rows(self, numbers: NDArray[np.int64]) -> Sparse:
        """A copy of some."""
        lengths = self.lengths[numbers]
        ends = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths)))
        places = np.repeat(self.ends[:-1][numbers] - ends[:-1], lengths) + np.arange(ends[-1])
        return Sparse(ends, self.columns[places], self.counts[places], self.num_columns)

    def num_rows_with(self, is_counted: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
        """For every column, how many of the rows have it."""
        found = np.zeros(self.num_columns, dtype=np.int64)
        for rows, entries in self.blocks():
            columns = self.columns[entries]
            if is_counted is not None:
                columns = columns[np.repeat(is_counted[rows], self.lengths[rows])]
            found += np.bincount(columns, minlength=self.num_columns)
        return found
