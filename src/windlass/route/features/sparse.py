"""Sparse rows in three arrays (CSR), with the few products that fitting needs. numpy only: scipy would be a second dependency."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Sparse:
    ends: NDArray[np.int64]
    """Row i has the entries from ends[i] to ends[i + 1]."""
    columns: NDArray[np.int32]
    values: NDArray[np.float32]
    num_columns: int

    def __len__(self) -> int:
        return len(self.ends) - 1

    @property
    def row_numbers(self) -> NDArray[np.int32]:
        """Of every entry."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.ends))

    def times(self, vector: NDArray[Any]) -> NDArray[np.float64]:
        return self.row_sums(self.values * vector[self.columns])

    def transposed_times(self, vector: NDArray[Any]) -> NDArray[np.float64]:
        spread = np.repeat(vector, np.diff(self.ends))
        found = np.bincount(self.columns, weights=self.values * spread, minlength=self.num_columns)
        return found.astype(np.float64, copy=False)

    def row_sums(self, entries: NDArray[Any]) -> NDArray[np.float64]:
        """Differences of a running sum, because `reduceat` takes an empty row's neighbour."""
        total = np.concatenate(([0.0], np.cumsum(entries, dtype=np.float64)))
        return total[self.ends[1:]] - total[self.ends[:-1]]

    def rows(self, numbers: NDArray[np.int64]) -> Sparse:
        lengths = np.diff(self.ends)[numbers]
        ends = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths)))
        places = np.repeat(self.ends[:-1][numbers] - ends[:-1], lengths) + np.arange(ends[-1])
        return Sparse(ends, self.columns[places], self.values[places], self.num_columns)

    def num_rows_with(self) -> NDArray[np.int64]:
        """For every column, how many rows have it."""
        return np.bincount(self.columns, minlength=self.num_columns)

    def scaled(self, by_column: NDArray[np.float32]) -> Sparse:
        """Columns scaled (those scaled by 0 are left out), then rows of length 1."""
        factors = by_column[self.columns]
        kept = factors != 0
        ends = np.concatenate(([0], np.cumsum(kept)))[self.ends]
        found = Sparse(ends, self.columns[kept], self.values[kept] * factors[kept], self.num_columns)
        norms = np.sqrt(found.row_sums(found.values * found.values))
        inverse = np.where(norms > 0, 1.0 / np.maximum(norms, 1e-12), 0.0)
        lengths = np.diff(ends)
        return Sparse(ends, found.columns, found.values * np.repeat(inverse, lengths).astype(np.float32), self.num_columns)

    def with_columns(self, used: NDArray[np.int64]) -> Sparse:
        """The same rows over the columns `used` alone, which hold all entries."""
        places = np.zeros(self.num_columns, dtype=np.int32)
        places[used] = np.arange(len(used), dtype=np.int32)
        return Sparse(self.ends, places[self.columns], self.values, len(used))

    def folded(self, num_columns: int) -> NDArray[np.float32]:
        """Dense, of even columns only, halved and modulo `num_columns`."""
        is_even = self.columns % 2 == 0
        places = self.row_numbers[is_even].astype(np.int64) * num_columns + self.columns[is_even] // 2 % num_columns
        size = len(self) * num_columns
        found = np.bincount(places, weights=self.values[is_even], minlength=size)
        return found.reshape(len(self), num_columns).astype(np.float32)
