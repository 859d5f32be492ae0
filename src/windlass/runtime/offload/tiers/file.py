"""The file that holds weights as kernels read them: blocks on multiples of 4,096 bytes, then an index, found through the first block.

It is written without a name and gets one when it is complete: a process that is killed leaves nothing behind. Without a name to keep it
under (no --disk-folder) it is gone when the process ends. A file that is found again is checked: its index, its size, and some of its
blocks.
"""

from __future__ import annotations

import os
import random
import struct
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from windlass.core.constants import DECODE_ERRORS
from windlass.core.model import Frozen
from windlass.core.tiers.values import BLOCK_BYTES, in_blocks
from windlass.errors import BadInput
from windlass.model.formats.disk.atomic import write_errors, write_fully
from windlass.runtime.machine.disk import PART_SUFFIX, direct, this_host, unnamed_file
from windlass.runtime.offload.tiers.forms import MatrixForm
from windlass.runtime.offload.tiers.memory import page_aligned, view

MAGIC = b"windlass tier 1\n"
HEAD = struct.Struct("<16sQQI")
"""Magic, offset and length of the index, its CRC-32."""
CHECKED_BYTES = 2**24
CHECKED_BLOCKS = 8
SUFFIX = ".tier"
STAGING_BYTES = 2**22


class TierEntry(Frozen):
    """`count` blocks of equal size, one after another: the experts of a layer, or a single matrix."""

    offset: int
    block_bytes: int
    """A multiple of 4,096."""
    checksums: tuple[int, ...]
    forms: tuple[MatrixForm, ...] = ()
    """The matrices in a block."""

    @property
    def count(self) -> int:
        return len(self.checksums)


class TierIndex(Frozen):
    key: str
    """Of what the blocks were made from; another key is another model, quantization or rank."""
    entries: dict[str, TierEntry]


class TierWriter:
    """Appends blocks. `finish` writes the index and, if the file is to be kept, gives it its name."""

    def __init__(self, folder: Path, key: str, *, keep: bool) -> None:
        self._path, self._key, self._keep = tier_path(folder, key), key, keep
        self._entries: dict[str, TierEntry] = {}
        self._end = BLOCK_BYTES
        with write_errors(folder, 0):
            self._descriptor, self._part = unnamed_file(folder)
        self._memory = page_aligned(STAGING_BYTES)

    @property
    def path(self) -> Path:
        return self._path

    def add(self, name: str, forms: tuple[MatrixForm, ...], blocks: Iterable[Sequence[memoryview]]) -> TierEntry:
        """`blocks`: of each block, its matrices as `forms` describes them."""
        offset, size = self._end, in_blocks(forms[-1].at + forms[-1].num_bytes)
        checksums = [
            self._write_block([(form.at, part) for form, part in zip(forms, parts, strict=True)], size) for parts in blocks
        ]
        entry = TierEntry(offset=offset, block_bytes=size, checksums=tuple(checksums), forms=forms)
        self._entries[name] = entry
        return entry

    def finish(self) -> OpenedTier:
        index = TierIndex(key=self._key, entries=self._entries)
        content = msgspec.json.encode(index)
        with write_errors(self._path, len(content)):
            write_fully(self._descriptor, memoryview(content), self._end)
            write_fully(self._descriptor, memoryview(HEAD.pack(MAGIC, self._end, len(content), zlib.crc32(content))), 0)
            os.fsync(self._descriptor)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            self._name()
        reading = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY)
        os.close(self._descriptor)
        self._descriptor = -1
        return OpenedTier(direct(reading), index, self._path if self._keep else None)

    def abort(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._part is not None:
            self._part.unlink(missing_ok=True)

    def _name(self) -> None:
        if self._part is not None:
            self._part.replace(self._path) if self._keep else self._part.unlink()
        elif self._keep:
            self._path.unlink(missing_ok=True)  # a name can only be given where there is none
            _give_name(self._descriptor, self._path)

    def _write_block(self, parts: list[tuple[int, memoryview]], size: int) -> int:
        """Gaps are zero. Through a buffer of a few megabytes, as direct writes need."""
        if size > self._memory.numel():
            self._memory = page_aligned(size)
        buffer = self._memory[:size]
        target, position = view(buffer), 0
        for at, part in parts:
            target[position:at] = bytes(at - position)
            target[at : at + len(part)] = part
            position = at + len(part)
        target[position:size] = bytes(size - position)
        with write_errors(self._path, size):
            write_fully(self._descriptor, target, self._end)
            os.posix_fadvise(self._descriptor, self._end, size, os.POSIX_FADV_DONTNEED)
        self._end += size
        return zlib.crc32(target)


class OpenedTier:
    """A complete file, open for direct reads."""

    def __init__(self, descriptor: int, index: TierIndex, path: Path | None) -> None:
        self.descriptor, self.index, self.path = descriptor, index, path

    @property
    def name(self) -> str:
        return str(self.path or "the offload file")

    def discard(self) -> None:
        """Removes it: something else is needed, and there may be no room for both."""
        os.close(self.descriptor)
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    @property
    def num_bytes(self) -> int:
        return sum(entry.block_bytes * entry.count for entry in self.index.entries.values())


def find_tier(folder: Path, key: str) -> OpenedTier | None:
    """The file of an earlier run, checked; a damaged one is removed."""
    path = tier_path(folder, key)
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None
    index = _read_index(descriptor)
    if index is None or index.key != key or not _samples_match(descriptor, index):
        os.close(descriptor)
        with write_errors(path, 0):
            path.unlink(missing_ok=True)
        return None
    return OpenedTier(direct(descriptor), index, path)


def written_entries(folder: Path, key: str) -> frozenset[str]:
    """Names in the file of an earlier run, which is checked only when it is used; empty: there is none."""
    return frozenset(written_counts(folder, key))


def written_counts(folder: Path, key: str) -> dict[str, int]:
    """The same with the number of blocks of each."""
    try:
        descriptor = os.open(tier_path(folder, key), os.O_RDONLY)
    except OSError:
        return {}
    try:
        index = _read_index(descriptor)
    finally:
        os.close(descriptor)
    return {} if index is None or index.key != key else {name: entry.count for name, entry in index.entries.items()}


def tier_path(folder: Path, key: str) -> Path:
    return folder / f"{key[:32]}{SUFFIX}"


def clear_leftovers(folder: Path) -> list[Path]:
    """Removes unfinished files of this machine's processes that no longer run; only file systems without unnamed files have any."""
    removed: list[Path] = []
    for path in folder.glob(f".*{PART_SUFFIX}"):
        _, owner, host, *_ = path.name.split(".")
        if host == this_host() and owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def _give_name(descriptor: int, path: Path) -> None:
    """linkat(2) with AT_SYMLINK_FOLLOW, which os.link only uses with a directory."""
    folder = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(FileExistsError):  # another process has just written the same
            os.link(str(descriptor), path, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def _read_index(descriptor: int) -> TierIndex | None:
    """None: damaged, of another version, or cut short."""
    size = os.fstat(descriptor).st_size
    head = os.pread(descriptor, HEAD.size, 0)
    if len(head) < HEAD.size:
        return None
    magic, offset, length, checksum = HEAD.unpack(head)
    if magic != MAGIC or offset + length != size:
        return None
    content = os.pread(descriptor, length, offset)
    if zlib.crc32(content) != checksum:
        return None
    try:
        index = msgspec.json.decode(content, type=TierIndex)
    except DECODE_ERRORS:
        return None
    ends = [entry.offset + entry.block_bytes * entry.count for entry in index.entries.values()]
    return index if all(end <= offset for end in ends) else None


def _samples_match(descriptor: int, index: TierIndex) -> bool:
    """Some blocks, others every time: reading all would take as long as loading."""
    every = [(entry, number) for entry in index.entries.values() for number in range(entry.count)]
    for entry, number in random.sample(every, min(CHECKED_BLOCKS, len(every))):
        checksum, start = 0, entry.offset + number * entry.block_bytes
        for at in range(0, entry.block_bytes, CHECKED_BYTES):  # a read returns at most 2 GiB
            checksum = zlib.crc32(os.pread(descriptor, min(CHECKED_BYTES, entry.block_bytes - at), start + at), checksum)
        if checksum != entry.checksums[number]:
            return False
    return True
