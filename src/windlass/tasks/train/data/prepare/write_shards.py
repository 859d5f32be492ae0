"""Writes token shards atomically: under hidden names until complete. Knows tokens, no text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from windlass.model.formats.disk.atomic import part_name, sync_directory, write_atomically, write_errors
from windlass.tasks.train.data.checksums import BlockChecksums
from windlass.tasks.train.data.shards import (
    BLOCKS,
    DOCUMENTS,
    LEARNED,
    MANIFEST,
    TOKENS,
    ShardFile,
    ShardManifest,
    Split,
    TokenShard,
    TokenType,
)

LARGEST_UINT16 = 1 << 16
Run = tuple[int, int]
"""A range of tokens to train on."""


def token_type_for(vocab_size: int) -> TokenType:
    return "uint16" if vocab_size <= LARGEST_UINT16 else "uint32"


class TokenShardWriter:
    """Writes one shard. Tokens are streamed to disk; memory holds 8 bytes per document and 16 per range."""

    def __init__(self, folder: Path, name: str, split: Split, token_type: TokenType) -> None:
        self._folder, self._name = folder, name
        self._split: Split = split
        self._dtype = np.dtype(token_type).newbyteorder("<")
        self._path = folder / f"{name}.{TOKENS}"
        with write_errors(self._path, 0):
            self._stream = part_name(self._path).open("wb")
        self._digest, self._blocks = sha256(), BlockChecksums()
        self._num_tokens = 0
        self._ends: list[NDArray[np.int64]] = [np.zeros(1, np.int64)]
        self._runs: list[NDArray[np.int64]] = []
        self._masked = False

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def add(self, tokens: NDArray[Any] | Sequence[int], learned: Iterable[Run] | None = None) -> None:
        """Adds one non-empty document. `learned`: None means all of it."""
        runs = None if learned is None else np.array(list(learned), np.int64).reshape(-1, 2)
        self.add_many(np.asarray(tokens), np.array([len(tokens)]), runs)

    def add_many(self, tokens: NDArray[Any], lengths: NDArray[np.int64], learned: NDArray[np.int64] | None = None) -> None:
        """Adds concatenated non-empty documents; `learned`: ranges [runs, 2] over all of them, sorted and disjoint."""
        stored = np.ascontiguousarray(tokens, self._dtype)
        with write_errors(self._path, stored.nbytes):
            self._stream.write(stored.data)
        self._digest.update(stored.data)
        self._blocks.update(stored.data)
        start = self._num_tokens
        self._num_tokens += len(stored)
        self._ends.append(start + np.cumsum(lengths))
        self._masked |= learned is not None
        everything = np.array([[0, len(stored)]])
        self._runs.append(start + (everything if learned is None else learned[learned[:, 1] > learned[:, 0]]))

    def finish(self) -> TokenShard:
        """Syncs and renames all files."""
        with write_errors(self._path, 0):
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
        ends, runs = np.concatenate(self._ends), _joined(self._runs)
        files = {TOKENS: ShardFile(num_bytes=self._num_tokens * self._dtype.itemsize, sha256=self._digest.hexdigest())}
        files[DOCUMENTS] = self._write(DOCUMENTS, ends.astype("<u8"))
        files[BLOCKS] = self._write(BLOCKS, self._blocks.finish())
        if self._masked:
            files[LEARNED] = self._write(LEARNED, runs.astype("<u8"))
        with write_errors(self._path, 0):
            part_name(self._path).replace(self._path)
            sync_directory(self._folder)
        return TokenShard(
            name=self._name,
            split=self._split,
            num_tokens=self._num_tokens,
            num_documents=len(ends) - 1,
            num_learned=int((runs[:, 1] - runs[:, 0]).sum()),
            files=files,
        )

    def abandon(self) -> None:
        """Removes the temporary files."""
        self._stream.close()
        part_name(self._path).unlink(missing_ok=True)

    def _write(self, ending: str, values: NDArray[Any]) -> ShardFile:
        content = values.tobytes()
        write_atomically(self._folder / f"{self._name}.{ending}", content)
        return ShardFile(num_bytes=len(content), sha256=sha256(content).hexdigest())


def _joined(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Merges adjacent ranges: readers rely on gaps between them."""
    runs = np.concatenate([np.empty((0, 2), np.int64), *parts])
    if not len(runs):
        return runs
    apart = runs[1:, 0] > runs[:-1, 1]
    return np.stack([runs[np.concatenate([[True], apart]), 0], runs[np.concatenate([apart, [True]]), 1]], axis=1)


def write_manifest(folder: Path, manifest: ShardManifest) -> None:
    """Written last: a folder with a manifest is complete."""
    write_atomically(folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
