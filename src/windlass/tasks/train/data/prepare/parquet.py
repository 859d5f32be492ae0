"""Reads Parquet with pyarrow, an optional package imported only here."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from windlass.errors import BadInput, MissingExtra

ROWS_AT_ONCE = 1024


def group_bytes(path: Path) -> list[int]:
    """Stored size of every row group."""
    with _opened(path) as file:
        return [file.metadata.row_group(number).total_byte_size for number in range(file.metadata.num_row_groups)]


def read_rows(path: Path, start: int, stop: int, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """(row number, values) of these row groups, for the columns that the file has; instead of values that are no text, why."""
    with _opened(path) as file:
        present = [name for name in columns if name in file.schema_arrow.names]
        if not present:
            raise BadInput(f"{path} has no column {' or '.join(columns)}; it has {', '.join(file.schema_arrow.names[:12])}")
        row = sum(file.metadata.row_group(number).num_rows for number in range(start))
        for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, row_groups=list(range(start, stop)), columns=present):
            for values in _values(batch):
                yield row, values
                row += 1


def _values(batch: Any) -> Iterator[dict[str, Any] | str]:
    """pyarrow does not check that its strings are UTF-8 until they are taken."""
    try:
        yield from batch.to_pylist()
        return
    except UnicodeDecodeError:
        pass  # one row at a time, to find which
    for row in range(batch.num_rows):
        try:
            yield batch.slice(row, 1).to_pylist()[0]
        except UnicodeDecodeError as error:
            yield f"has text that is not UTF-8: byte {error.start:,} of it is 0x{error.object[error.start]:02x} ({error.reason})"


@contextmanager
def _opened(path: Path) -> Generator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtra("pyarrow", "train", "reading Parquet") from None
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInput(f"{path} is not a valid Parquet file: {(str(error).splitlines() or ['unreadable'])[0]}") from None
