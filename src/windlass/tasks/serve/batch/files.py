"""Uploaded and written files in a folder of the server's: `ID.data` beside `ID.json`, which says what it is and whose.

Ids are made here and checked before they become a path. Everything is written under a temporary name and renamed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from uuid import uuid4

import msgspec

from windlass.core.model import Frozen

ID = re.compile(r"(?:file|batch)-[0-9a-f]{32}")
MAX_FILES = 1000
MAX_BYTES = 2**30
"""Of each owner's."""


class StoredFile(Frozen):
    id: str
    owner: str
    """The name of a key; empty: without keys."""
    filename: str
    purpose: str
    created_at: int
    num_bytes: int

    @property
    def body(self) -> dict[str, object]:
        """As the API shows it."""
        return {
            "id": self.id, "object": "file", "bytes": self.num_bytes, "created_at": self.created_at, "filename": self.filename,
            "purpose": self.purpose, "status": "processed",
        }  # fmt: skip


def new_id(kind: str) -> str:
    return f"{kind}-{uuid4().hex}"


WriteFile = Callable[[Path, bytes], None]
"""Writes a file whole or not at all (formats.disk.atomic.write_atomically)."""


class FileStore:
    def __init__(self, folder: Path, write: WriteFile) -> None:
        self.folder, self.write = folder, write
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def put(self, owner: str, filename: str, purpose: str, data: bytes, id: str = "") -> StoredFile:
        found = StoredFile(
            id=id or new_id("file"),
            owner=owner,
            filename=filename[:200],
            purpose=purpose,
            created_at=int(time.time()),
            num_bytes=len(data),
        )
        self.write(self.data(found.id), data)
        self.write(self._record(found.id), msgspec.json.encode(found))
        return found

    def put_lines(self, owner: str, filename: str, purpose: str, lines: Iterable[bytes], id: str) -> int:
        """As `put`, without holding the file in memory; nothing is written if there are none. Returns their number."""
        part, count = self.folder / f".{id}.part", 0
        try:
            with part.open("wb") as out:
                for line in lines:
                    out.write(line)
                    count += 1
            if not count:
                return 0
            part.replace(self.data(id))
        finally:
            part.unlink(missing_ok=True)
        size = self.data(id).stat().st_size
        found = StoredFile(
            id=id, owner=owner, filename=filename[:200], purpose=purpose, created_at=int(time.time()), num_bytes=size
        )
        self.write(self._record(id), msgspec.json.encode(found))
        return count

    def has_room(self, owner: str, num_bytes: int) -> bool:
        own = self.of(owner)
        return len(own) < MAX_FILES and sum(file.num_bytes for file in own) + num_bytes <= MAX_BYTES

    def get(self, owner: str, id: str) -> StoredFile | None:
        """None: there is none, or it is another's."""
        if ID.fullmatch(id) is None:
            return None
        try:
            found = msgspec.json.decode(self._record(id).read_bytes(), type=StoredFile)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        return found if found.owner == owner and self.data(id).is_file() else None

    def of(self, owner: str) -> list[StoredFile]:
        found = (self.get(owner, path.stem) for path in sorted(self.folder.glob("file-*.json")))
        return sorted((file for file in found if file is not None), key=lambda file: file.created_at)

    def delete(self, owner: str, id: str) -> bool:
        if self.get(owner, id) is None:
            return False
        self._record(id).unlink(missing_ok=True)
        self.data(id).unlink(missing_ok=True)
        return True

    def data(self, id: str) -> Path:
        return self.folder / f"{id}.data"

    def _record(self, id: str) -> Path:
        return self.folder / f"{id}.json"
