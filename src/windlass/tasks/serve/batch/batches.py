"""Batches: their state on disk, and the pure steps between states. A line of results is written as soon as it is there, so that a
server that is started again goes on where it was."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from windlass.core.model import Frozen
from windlass.tasks.serve.batch.files import ID, FileStore, new_id

Status = Literal["in_progress", "completed", "cancelled", "failed"]
MAX_LINES = 50_000
MAX_OUTPUT_BYTES = 256 * 2**20
"""Of one batch; lines beyond fail."""
MAX_OPEN = 16
"""Unfinished batches of each owner."""
MAX_KEPT = 1000
"""Batches of an owner; beyond that, those that have ended are forgotten, the oldest first. Their files stay."""


class BatchLine(Frozen):
    """One request of an input file."""

    custom_id: str
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


class ResultLine(msgspec.Struct, frozen=True):
    """What is looked at in a line of results."""

    custom_id: str
    error: dict[str, Any] | None


class Batch(Frozen):
    id: str
    owner: str
    """The name of a key; empty: without keys."""
    endpoint: str
    input_file_id: str
    output_file_id: str
    error_file_id: str
    created_at: int
    total: int
    status: Status = "in_progress"
    completed: int = 0
    failed: int = 0
    ended_at: int | None = None
    metadata: dict[str, str] | None = None
    key: int = 0
    """Not used: batches of earlier versions have the position of their owner's key, which is found by name now."""

    @property
    def body(self) -> dict[str, Any]:
        """As the API shows it."""
        is_done = self.status in ("completed", "cancelled")
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": self.status,
            "output_file_id": self.output_file_id if is_done and self.completed else None,
            "error_file_id": self.error_file_id if is_done and self.failed else None,
            "created_at": self.created_at,
            "in_progress_at": self.created_at,
            "completed_at": self.ended_at if self.status == "completed" else None,
            "cancelled_at": self.ended_at if self.status == "cancelled" else None,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


def new_batch(owner: str, endpoint: str, file_id: str, total: int, metadata: dict[str, str] | None) -> Batch:
    return Batch(
        id=new_id("batch"),
        owner=owner,
        endpoint=endpoint,
        input_file_id=file_id,
        output_file_id=new_id("file"),
        error_file_id=new_id("file"),
        created_at=int(time.time()),
        total=total,
        metadata=metadata,
    )


def read_lines(path: Path) -> list[BatchLine]:
    """Raises ValueError with the number of a line that is no request."""
    found: list[BatchLine] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(msgspec.json.decode(line, type=BatchLine))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise ValueError(f"line {number} is not a request with custom_id, method POST, url and body") from None
    return found


class BatchStore:
    def __init__(self, files: FileStore) -> None:
        self._files = files
        self._counted: dict[str, tuple[int, int, int]] = {}
        """Of batches that run: bytes of results that were counted, completed and failed ones among them."""

    def save(self, batch: Batch) -> None:
        self._files.write(self._path(batch.id), msgspec.json.encode(batch))

    def get(self, owner: str, id: str) -> Batch | None:
        found = self._read(id) if ID.fullmatch(id) else None
        return found if found is not None and found.owner == owner else None

    def all(self) -> list[Batch]:
        found = (self._read(path.stem) for path in self._files.folder.glob("batch-*.json"))
        return sorted((batch for batch in found if batch is not None), key=lambda batch: (batch.created_at, batch.id))

    def make_room(self, owner: str) -> int:
        """For one more batch: forgets the oldest of an owner that have ended, beyond `MAX_KEPT`. Returns how many have not."""
        own = [batch for batch in self.all() if batch.owner == owner]
        ended = [batch for batch in own if batch.status != "in_progress"]
        for batch in ended[: max(len(own) + 1 - MAX_KEPT, 0)]:
            self._path(batch.id).unlink(missing_ok=True)
        return len(own) - len(ended)

    def counts(self, batch: Batch) -> tuple[int, int]:
        """Completed and failed lines so far. Only what is new since the last time is read."""
        start, completed, failed = self._counted.get(batch.id, (0, 0, 0))
        for line in self._lines(batch, start):
            start += len(line)
            found = _result_of(line)
            completed += found is not None and found.error is None
            failed += found is not None and found.error is not None
        if len(self._counted) > MAX_KEPT:
            self._counted.clear()
        self._counted[batch.id] = (start, completed, failed)
        return completed, failed

    def partial(self, batch: Batch) -> Path:
        """Results so far, successes and failures."""
        return self._files.folder / f"{batch.id}.partial"

    def drop_half_line(self, batch: Batch) -> None:
        """Of results, which a crash may have cut off: the next line must not follow it."""
        path = self.partial(batch)
        data = path.read_bytes() if path.is_file() else b""
        if data and not data.endswith(b"\n"):
            self._files.write(path, data[: data.rfind(b"\n") + 1])

    def results(self, batch: Batch) -> Iterator[tuple[ResultLine, bytes]]:
        """One at a time."""
        for line in self._lines(batch):
            found = _result_of(line)
            if found is not None:
                yield found, line

    def _lines(self, batch: Batch, start: int = 0) -> Iterator[bytes]:
        """Complete ones behind the first `start` bytes: one that a crash cut off is made again."""
        try:
            file = self.partial(batch).open("rb")
        except OSError:
            return
        with file:
            file.seek(start)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                yield line

    def finish(self, batch: Batch, status: Status) -> Batch:
        """Writes the output files, and then that it has ended."""
        counts = {False: 0, True: 0}
        for is_bad, id, name in ((False, batch.output_file_id, "output"), (True, batch.error_file_id, "errors")):
            lines = (line for found, line in self.results(batch) if (found.error is not None) == is_bad)
            counts[is_bad] = self._files.put_lines(batch.owner, f"{batch.id}_{name}.jsonl", "batch_output", lines, id)
        ended = msgspec.structs.replace(
            batch, status=status, completed=counts[False], failed=counts[True], ended_at=int(time.time())
        )
        self.save(ended)
        self.partial(batch).unlink(missing_ok=True)
        return ended

    def _read(self, id: str) -> Batch | None:
        try:
            return msgspec.json.decode(self._path(id).read_bytes(), type=Batch)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None

    def _path(self, id: str) -> Path:
        return self._files.folder / f"{id}.json"


def _result_of(line: bytes) -> ResultLine | None:
    try:
        return msgspec.json.decode(line, type=ResultLine)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
