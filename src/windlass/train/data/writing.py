"""Writes token shards: under hidden names until all of a shard is on the disk, then renamed. Knows tokens, no text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from windlass.formats.disk import explained, part_name, sync_directory, write_atomically
from windlass.train.data.shards import DOCUMENTS, LEARNED, MANIFEST, TOKENS, Manifest, Shard, Split, StoredFile, TokenType

LARGEST_UINT16 = 1 << 16
Run = tuple[int, int]
"""Tokens of a document that are learned, from and to."""


def token_type_for(vocab_size: int) -> TokenType:
    return "uint16" if vocab_size <= LARGEST_UINT16 else "uint32"


class ShardWriter:
    """One shard. Tokens go to the disk as they come; what is kept in memory is 8 bytes a document and 16 a run."""

    def __init__(self, folder: Path, name: str, split: Split, token_type: TokenType) -> None:
        self._folder, self._name, self._split = folder, name, split
        self._dtype = np.dtype(token_type).newbyteorder("<")
        self._path = folder / f"{name}.{TOKENS}"
        with explained(self._path, 0):
            self._stream = part_name(self._path).open("wb")
        self._digest = sha256()
        self._ends = [0]
        self._runs: list[Run] = []
        self._masked = False

    @property
    def num_tokens(self) -> int:
        return self._ends[-1]

    def add(self, tokens: NDArray[Any] | Sequence[int], learned: Iterable[Run] | None = None) -> None:
        """One document, not empty. `learned`: None means all of it."""
        stored = np.ascontiguousarray(tokens, self._dtype)
        start = self._ends[-1]
        with explained(self._path, stored.nbytes):
            self._stream.write(stored.data)
        self._digest.update(stored.data)
        self._ends.append(start + len(stored))
        self._masked |= learned is not None
        for begin, end in ((0, len(stored)),) if learned is None else learned:
            self._learn(start + begin, start + end)

    def _learn(self, begin: int, end: int) -> None:
        """Runs that touch are one."""
        if end <= begin:
            return
        if self._runs and self._runs[-1][1] == begin:
            begin = self._runs.pop()[0]
        self._runs.append((begin, end))

    def finish(self) -> Shard:
        """All files under their names, on the disk."""
        with explained(self._path, 0):
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
        files = {TOKENS: StoredFile(num_bytes=self._ends[-1] * self._dtype.itemsize, sha256=self._digest.hexdigest())}
        files[DOCUMENTS] = self._write(DOCUMENTS, np.array(self._ends, "<u8"))
        if self._masked:
            files[LEARNED] = self._write(LEARNED, np.array(self._runs, "<u8").reshape(-1, 2))
        with explained(self._path, 0):
            part_name(self._path).replace(self._path)
            sync_directory(self._folder)
        return Shard(
            name=self._name,
            split=self._split,
            num_tokens=self._ends[-1],
            num_documents=len(self._ends) - 1,
            num_learned=sum(end - begin for begin, end in self._runs),
            files=files,
        )

    def abandon(self) -> None:
        """Leaves nothing behind."""
        self._stream.close()
        part_name(self._path).unlink(missing_ok=True)

    def _write(self, ending: str, values: NDArray[Any]) -> StoredFile:
        content = values.tobytes()
        write_atomically(self._folder / f"{self._name}.{ending}", content)
        return StoredFile(num_bytes=len(content), sha256=sha256(content).hexdigest())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Comes last: a folder with a manifest is whole."""
    write_atomically(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
