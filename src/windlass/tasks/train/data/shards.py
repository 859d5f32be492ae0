"""Token shards on disk: a manifest, and per shard the tokens, document offsets and the loss mask.

NAME.tokens.bin     the tokens of all documents, concatenated, uint16 or uint32
NAME.documents.bin  uint64: start offset of each document, and the end of the last
NAME.learned.bin    uint64 pairs: ranges of tokens to train on; without this file all tokens
NAME.blocks.bin     uint32: CRC-32 of every 64 KiB of the tokens; shards of earlier versions have none

Little-endian. Sizes are checked when a shard is opened, checksums as it is read, all of them by `find_damage`. Knows no text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from windlass.core.model import Frozen
from windlass.errors import BadInput
from windlass.tasks.train.data.checksums import BLOCK_BYTES, CheckedBlocks

MANIFEST = "manifest.json"
TOKENS, DOCUMENTS, LEARNED, BLOCKS = "tokens.bin", "documents.bin", "learned.bin", "blocks.bin"
Split = Literal["train", "validation"]
TokenType = Literal["uint16", "uint32"]
_CHUNK_BYTES = 1 << 22
_AGAIN = "; prepare it again with `windlass train data`"


class ShardFile(Frozen):
    num_bytes: int
    sha256: str


class TokenShard(Frozen):
    name: str
    split: Split
    num_tokens: int
    num_documents: int
    num_learned: int
    """Tokens with a loss."""
    files: dict[str, ShardFile]
    """By suffix."""


class ShardManifest(Frozen):
    tokenizer: str
    """SHA-256 of tokenizer.json."""
    vocab_size: int
    end_token: int
    """EOS: ends every text, and pads rows."""
    token_type: TokenType
    shards: tuple[TokenShard, ...]
    sources: tuple[str, ...] = ()
    version: int = 1

    def of_split(self, split: Split) -> tuple[TokenShard, ...]:
        return tuple(shard for shard in self.shards if shard.split == split)

    @property
    def fingerprint(self) -> str:
        """Digest of all tokens in order."""
        files = (sorted(shard.files.items()) for shard in self.shards)
        parts = [self.tokenizer, *(stored.sha256 for shard in files for ending, stored in shard if ending != BLOCKS)]
        return sha256("/".join(parts).encode()).hexdigest()


def read_manifest(folder: Path) -> ShardManifest:
    file = folder / MANIFEST
    if not file.is_file():
        unfinished = any(folder.glob(".*journal*")) if folder.is_dir() else False
        why = (
            "its preparation was not finished; run the same `windlass train data` command again"
            if unfinished
            else "there is no manifest.json"
        )
        raise BadInput(f"{folder} has no token shards: {why if folder.is_dir() else 'the directory does not exist'}")
    try:
        manifest = msgspec.json.decode(file.read_bytes(), type=ShardManifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"{file} is damaged: {error}; prepare the shards again with `windlass train data`") from None
    if manifest.version != 1:
        raise BadInput(f"{file} has version {manifest.version}; this Windlass reads version 1")
    return manifest


class OpenShard:
    """One shard, memory-mapped. What is read is checked: tokens in blocks, the small files as a whole."""

    def __init__(self, folder: Path, shard: TokenShard, token_type: TokenType, vocab_size: int) -> None:
        """`vocab_size`: tokens are below it."""
        self.shard, self.folder = shard, folder
        self._token_type, self._vocab_size = token_type, vocab_size
        missing = {TOKENS, DOCUMENTS} - shard.files.keys()
        width = np.dtype(token_type).itemsize
        if missing or shard.files[TOKENS].num_bytes != width * shard.num_tokens or _is_uneven(shard):
            raise BadInput(f"{folder / MANIFEST} is damaged: the sizes of {shard.name} do not agree{_AGAIN}")
        for ending, stored in shard.files.items():
            _check_size(folder / f"{shard.name}.{ending}", stored)

    @property
    def has_checksums(self) -> bool:
        """Of the blocks of its tokens."""
        return BLOCKS in self.shard.files

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens [start, stop), as many as there are."""
        tokens = self._tokens[start:stop]
        if not len(tokens):
            return tokens
        if self._blocks is not None:
            size = tokens.itemsize
            block = self._blocks.damaged(start * size, (start + len(tokens)) * size - 1)
            if block is not None:
                raise self._damaged(TOKENS, f"byte {block * BLOCK_BYTES:,} or one of the {BLOCK_BYTES:,} after it has changed")
        return tokens

    def check_vocabulary(self, tokens: NDArray[Any]) -> None:
        """Of many reads at once."""
        if (largest := int(tokens.max())) >= self._vocab_size:
            raise BadInput(
                f"the shard {self._file(TOKENS)} has the token {largest:,}, but the model's vocabulary is {self._vocab_size:,}:"
                f" find out whether it is damaged with `windlass train data {self.folder} --verify`, or prepare it with the model's tokenizer"
            )

    @cached_property
    def documents(self) -> NDArray[np.uint64]:
        found = self._checked(DOCUMENTS, np.dtype("<u8"))
        self._check_offsets(DOCUMENTS, found, is_whole=True)
        return found

    @cached_property
    def learned(self) -> NDArray[np.uint64] | None:
        """[runs, 2]; None: all tokens."""
        if LEARNED not in self.shard.files:
            return None
        found = self._checked(LEARNED, np.dtype("<u8"))
        self._check_offsets(LEARNED, found, is_whole=False)
        return found.reshape(-1, 2)

    @cached_property
    def _tokens(self) -> NDArray[Any]:
        return self._mapped(TOKENS, np.dtype(self._token_type).newbyteorder("<"))

    @cached_property
    def _blocks(self) -> CheckedBlocks | None:
        if not self.has_checksums:
            return None
        return CheckedBlocks(self._tokens.data.cast("B"), self._checked(BLOCKS, np.dtype("<u4")))

    def _checked(self, ending: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        found = self._mapped(ending, dtype)
        if sha256(found.data).hexdigest() != self.shard.files[ending].sha256:
            raise self._damaged(ending, "its checksum differs from the manifest")
        return found

    def _check_offsets(self, ending: str, found: NDArray[np.uint64], is_whole: bool) -> None:
        """Offsets of tokens rise. Those of documents begin at 0 and end with the tokens; those of ranges are pairs."""
        count = self.shard.num_tokens
        is_sound = len(found) == 0 or (bool((found[:-1] <= found[1:]).all()) and int(found[-1]) <= count)
        ends = len(found) > 0 and (int(found[0]), int(found[-1])) == (0, count)
        if not is_sound or not (ends if is_whole else len(found) % 2 == 0):
            raise self._damaged(ending, f"its offsets are not those of {count:,} tokens")

    def _mapped(self, ending: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        if self.shard.files[ending].num_bytes == 0:  # an empty file cannot be mapped
            return np.empty(0, dtype)
        return np.memmap(self._file(ending), dtype, mode="r").view(np.ndarray)  # memmap's own slices are slow

    def _file(self, ending: str) -> Path:
        return self.folder / f"{self.shard.name}.{ending}"

    def _damaged(self, ending: str, how: str) -> BadInput:
        return BadInput(
            f"the shard {self._file(ending)} is damaged: {how}; find all damage with `windlass train data {self.folder} --verify`,"
            " prepare the shards again with `windlass train data`, and continue with --resume"
        )


def _is_uneven(shard: TokenShard) -> bool:
    """Offsets are of eight bytes. A manifest may come from elsewhere: a name leads nowhere else."""
    is_elsewhere = "/" in shard.name or "\0" in shard.name
    return is_elsewhere or any(shard.files[ending].num_bytes % 8 for ending in (DOCUMENTS, LEARNED) if ending in shard.files)


def open_shards(folder: Path, manifest: ShardManifest, split: Split, vocab_size: int | None = None) -> list[OpenShard]:
    """`vocab_size`: the model's, if it is larger than the tokenizer's."""
    size = manifest.vocab_size if vocab_size is None else vocab_size
    return [OpenShard(folder, shard, manifest.token_type, size) for shard in manifest.of_split(split)]


def _check_size(file: Path, stored: ShardFile) -> None:
    try:
        num_bytes = file.stat().st_size
    except OSError as error:
        raise BadInput(f"cannot open the shard {file}: {error.strerror}; prepare it again with `windlass train data`") from None
    if num_bytes != stored.num_bytes:
        raise BadInput(
            f"the shard {file} is damaged: {num_bytes} bytes instead of {stored.num_bytes}; prepare it again with `windlass train data`"
        )


def file_sha256(file: Path, seen: Callable[[int], None] = lambda _: None) -> str:
    """`seen` is called with the number of bytes read."""
    digest = sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            seen(len(chunk))
    return digest.hexdigest()


def find_damage(folder: Path, manifest: ShardManifest, seen: Callable[[int], None] = lambda _: None) -> Iterator[str]:
    """One line for every file that is missing, has the wrong size or the wrong checksum."""
    for shard in manifest.shards:
        for ending, stored in shard.files.items():
            file = folder / f"{shard.name}.{ending}"
            try:
                _check_size(file, stored)
            except BadInput as error:
                yield str(error)
                continue
            if file_sha256(file, seen) != stored.sha256:
                yield f"the shard {file} is damaged: its checksum differs from the manifest; prepare it again with `windlass train data`"
