"""The file of experts below host memory beside a device: written as a model is loaded, or found, and then read by the CPU's part and by prompts.

Experts lie in it in the device's tiles, gate and up, then down, each expert one block: what is read can be computed by the CPU, or copied to the
device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from windlass.core.tiers.device import RING_SLOTS, DeviceSplit
from windlass.core.tiers.values import in_blocks
from windlass.errors import Impossible
from windlass.runtime.kernels.cuda.layout import Tiles
from windlass.runtime.kernels.program import reads
from windlass.runtime.offload.device.cache import PIECE_BYTES, CacheForm, DiskCache
from windlass.runtime.offload.device.pinned import PinnedMemory
from windlass.runtime.offload.device.share import library
from windlass.runtime.offload.tiers.file import OpenedTier, TierWriter, find_tier, written_counts
from windlass.runtime.offload.tiers.forms import MatrixForm, expert_forms, matrix_bytes
from windlass.runtime.offload.tiers.memory import view
from windlass.runtime.offload.tiers.reader import DirectReader, ReadCounts, burst_speed

DEPTH = 16
"""Reads in flight, of a megabyte each: more than one expert at a time."""
PATIENT = 10
"""The device waits so many times as long for an answer as reading a whole layer takes: disks are slow at times."""


class DiskPlace(NamedTuple):
    """Where the file is, and how fast."""

    folder: Path
    key: str
    keep: bool
    """The file stays in the folder under its name."""
    bytes_per_second: float


def written_experts(folder: Path, key: str) -> int:
    """Of each layer, in the file of an earlier run; 0: there is none."""
    return min(written_counts(folder, key).values(), default=0)


class DiskExpertsFile:
    """Written layer by layer, unless it was found."""

    def __init__(self, place: DiskPlace, split: DeviceSplit, first_layer: int) -> None:
        if library() is None or not reads.available():
            raise Impossible(
                "experts on disk beside a GPU need the compiled kernels of the CPU; install a wheel that has them, or a C++ compiler"
            )
        self.place, self._split = place, split
        self._names = [_name(first_layer + layer) for layer in range(split.num_layers)]
        self._found = find_tier(place.folder, place.key) if place.keep else None
        if self._found is not None and not self._is_complete(self._found):
            self._found.discard()
            self._found = None
        self._writer = TierWriter(place.folder, place.key, keep=place.keep) if self._found is None else None

    @property
    def was_found(self) -> bool:
        return self._found is not None

    def write(self, layer: int, experts: Iterator[tuple[Tensor, Tensor]]) -> None:
        """Gate and up, and down, of each expert of the layer that belongs on disk, on the CPU."""
        assert self._writer is not None
        first = next(experts)
        self._writer.add(_name(layer), _forms(*first), _blocks(first, experts))

    def finish(self) -> OpenedTier:
        tier = self._found if self._writer is None else self._writer.finish()
        assert tier is not None
        return tier

    def offsets(self, tier: OpenedTier) -> list[int]:
        return [tier.index.entries[name].offset for name in self._names]

    def abort(self) -> None:
        if self._writer is not None:
            self._writer.abort()

    def _is_complete(self, tier: OpenedTier) -> bool:
        """Whether all that is placed on disk is there; more does no harm."""
        entries = tier.index.entries
        return all(name in entries and entries[name].count >= self._split.on_disk for name in self._names)


class DiskBelow:
    """The file in use: its reader, the cache of experts, and blocks that prompts are read through."""

    def __init__(self, file: DiskExpertsFile, split: DeviceSplit, gate_up: Tiles, down: Tiles, pinned: PinnedMemory) -> None:
        """`gate_up`, `down`: for their shape."""
        self._file, self._split = file, split
        self._forms = _forms(gate_up.data[0], down.data[0])
        self.block_bytes = in_blocks(self._forms[1].at + self._forms[1].num_bytes)
        self._shapes = gate_up.data.shape[1:], down.data.shape[1:]
        memory = pinned.piece((split.cache_slots + RING_SLOTS) * self.block_bytes).view(-1, self.block_bytes)
        self.slots, self.ring = memory[: split.cache_slots], memory[split.cache_slots :]
        self.name, self.offsets, self.num_file_bytes = "", list[int](), 0
        self._unasked = ReadCounts(0, 0.0)
        """Read to measure the disk."""
        self._reader: DirectReader | None = None
        self._cache: DiskCache | None = None

    def open(self) -> None:
        """Once all layers are written or found."""
        tier = self._file.finish()
        self.name, self.offsets, self.num_file_bytes = tier.name, self._file.offsets(tier), tier.num_bytes
        self._reader = DirectReader(tier.descriptor, tier.name, DEPTH, PIECE_BYTES)
        form = CacheForm(self._split.on_disk, self.block_bytes, self._forms[1].at)
        native = self._reader.native
        assert native is not None
        self._cache = DiskCache(form, self.offsets, self.slots, native, tier.name)

    @property
    def reader(self) -> DirectReader:
        assert self._reader is not None, "used before the file is complete"
        return self._reader

    @property
    def cache(self) -> DiskCache:
        assert self._cache is not None, "used before the file is complete"
        return self._cache

    def expert_in(self, block: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and up, and down, as they lie in a slot or a block of the ring."""
        gate_up, down = (
            block[form.at : form.at + form.num_bytes].view(shape) for form, shape in zip(self._forms, self._shapes, strict=True)
        )
        return gate_up, down

    @property
    def patience_seconds(self) -> float:
        """Beside what the CPU is given for computing: for reading all of a layer's experts."""
        return PATIENT * self._split.on_disk * self.block_bytes / max(self._file.place.bytes_per_second, 1.0)

    def burst_speed(self, experts: int) -> float:
        """Bytes per second of so many experts at a time, from random places, as layers ask for them. Nothing else may be read meanwhile."""
        places = [first + number * self.block_bytes for first in self.offsets for number in range(self._split.on_disk)]
        asked = self.counts
        found = burst_speed(self.reader, places, [view(block) for block in self.ring[:experts]])
        self._unasked = ReadCounts(*(now - then for now, then in zip(self.reader.counts, asked, strict=True)))
        return found

    @property
    def counts(self) -> ReadCounts:
        """Of what steps and prompts asked for."""
        return ReadCounts(*(all_ - measured for all_, measured in zip(self.reader.counts, self._unasked, strict=True)))

    def close(self) -> None:
        """When nobody asks for experts any more."""
        if self._cache is not None:
            self._cache.close()
        if self._reader is not None:
            self._reader.close()

    def abort(self) -> None:
        self._file.abort()
        self.close()


def _name(layer: int) -> str:
    return f"layers.{layer}.experts"


def _forms(gate_up: Tensor, down: Tensor) -> tuple[MatrixForm, MatrixForm]:
    """Of an expert's tiles: uint8 [tiles, blocks, block bytes] each."""
    return expert_forms(gate_up.flatten(1), down.flatten(1))


def _blocks(first: tuple[Tensor, Tensor], others: Iterator[tuple[Tensor, Tensor]]) -> Iterator[Sequence[memoryview]]:
    yield [matrix_bytes(matrix) for matrix in first]
    for expert in others:
        yield [matrix_bytes(matrix) for matrix in expert]
