"""A source of weights (core.ports.Weights) in which some live on disk: for these a decoder gets matrices that fill themselves.

While the decoder is built, what belongs on disk is written there matrix by matrix, or expert by expert, or is found in the file of an
earlier run. Everything else comes from the source behind, as always. `finish` lays out the buffers, when all of it is known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from torch import Tensor

from windlass.core.model import ModelSpec, Wiring
from windlass.core.place import Interval
from windlass.core.ports import Weights
from windlass.core.tiers.demand import unit_name
from windlass.core.tiers.values import TierPlacement
from windlass.runtime.kernels.packing.panels import Panels
from windlass.runtime.kernels.packing.tiered import StreamedMatrix
from windlass.runtime.offload.experts.cache import ExpertCache
from windlass.runtime.offload.experts.experts import DiskExperts, ExpertSlots
from windlass.runtime.offload.stats import DiskTier
from windlass.runtime.offload.stream.stream import MatrixStream, StreamedBlock
from windlass.runtime.offload.tiers.file import OpenedTier, TierEntry, TierIndex, TierWriter, find_tier
from windlass.runtime.offload.tiers.forms import expert_forms, matrix_bytes, stacked_bytes, stacked_forms, stacked_in
from windlass.runtime.offload.tiers.reader import DirectReader

LAYOUT_VERSION = 1
"""Of matrices in memory (runtime/kernels/native/panel/panel.h): a file of another version is of no use."""


class ExpertSource(Weights, Protocol):
    """Weights that can give some of a layer's experts, and leave out what is not needed."""

    spec: ModelSpec

    def experts(self, layer: int, *parts: str, only: Interval | None = None) -> Any: ...

    def num_experts(self) -> int:
        """Of each layer, on this rank."""
        ...

    def skip(self, *names: str) -> None:
        """These are not read: progress counts them as done."""
        ...

    def skip_experts(self, layer: int, count: int) -> None:
        """The same for the first experts of a layer."""
        ...


def tier_key(**parts: Any) -> str:
    """Names the file: another model, quantization or rank is another file."""
    return hashlib.sha256(msgspec.json.encode([LAYOUT_VERSION, sorted(parts.items())])).hexdigest()


class TieredWeights:
    def __init__(
        self, behind: ExpertSource, placed: TierPlacement, folder: Path, key: str, *, keep: bool, spare_bytes: int = 0
    ) -> None:
        """`keep`: the file stays in the folder under its name. `spare_bytes`: free once everything is loaded."""
        self._spare_bytes = spare_bytes
        self.device, self.dtype, self.spec = behind.device, behind.dtype, behind.spec
        self._behind, self._placed, self._units = behind, placed, frozenset(placed.disk_units)
        self._found = find_tier(folder, key) if keep else None
        if self._found is not None and not self._is_complete(self._found.index):
            self._found.discard()
            self._found = None
        self._writer = TierWriter(folder, key, keep=keep) if self._found is None else None
        self._streamed: dict[str, StreamedMatrix] = {}
        self._experts: dict[int, DiskExperts] = {}

    @property
    def was_found(self) -> bool:
        return self._found is not None

    # --- core.ports.Weights

    def matrix(self, *names: str) -> Any:
        name = unit_name(names)
        if name is None or name not in self._units:
            return self._behind.matrix(*names)
        if self._writer is not None:
            matrix = self._behind.matrix(*names)
            self._writer.add(name, stacked_forms(matrix), [stacked_bytes(matrix)])
        else:
            self._behind.skip(*names)
        self._streamed[name] = StreamedMatrix()
        return self._streamed[name]

    def dense_matrix(self, *names: str) -> Any:
        return self._behind.dense_matrix(*names)

    def vector(self, *names: str) -> Any:
        return self._behind.vector(*names)

    def experts(self, layer: int, *parts: str) -> Any:
        if not self._placed.disk_experts:
            return self._behind.experts(layer, *parts)
        if layer not in self._experts:
            self._experts[layer] = DiskExperts(len(self._experts), self._expert_entry(layer))
        return self._experts[layer]

    def expert_vectors(self, layer: int, *parts: str) -> Any:
        return self._behind.expert_vectors(layer, *parts)

    # --- what is on disk

    def finish(self) -> DiskTier:
        """Gives everything its place in memory. Nothing of the source behind is needed any more."""
        tier = self._found if self._writer is None else self._writer.finish()
        assert tier is not None
        reader = DirectReader(tier.descriptor, tier.name)
        stream = self._bind_stream(tier, reader)
        slots = self._bind_slots(reader)
        return DiskTier(self._placed, tier, reader, stream, slots)

    def abort(self) -> None:
        if self._writer is not None:
            self._writer.abort()

    def _bind_stream(self, tier: OpenedTier, reader: DirectReader) -> MatrixStream | None:
        names = sorted(self._streamed, key=lambda name: _use_order(self.spec, name))
        entries = [tier.index.entries[name] for name in names]
        if not names:
            return None
        blocks = [StreamedBlock(entry.offset, entry.block_bytes) for entry in entries]
        largest = max(block.num_bytes for block in blocks)
        # What loading needed beside the weights is free now: a longer ring reads on while other things are computed.
        stream = MatrixStream(reader, blocks, max(self._placed.ring_bytes, 2 * largest) + self._spare_bytes)
        for index, (name, entry) in enumerate(zip(names, entries, strict=True)):
            stream.bind(index, self._streamed[name], stacked_in(entry.forms, stream.memory(index)))
        return stream

    def _bind_slots(self, reader: DirectReader) -> ExpertSlots | None:
        layers = list(self._experts.values())
        if not layers:
            return None
        cache = ExpertCache(len(layers), max(layer.num_experts for layer in layers), self._placed.host_slots)
        slots = ExpertSlots(reader, cache, max(layer.block_bytes for layer in layers))
        for layer in layers:
            layer.bind(slots)
        return slots

    def _expert_entry(self, layer: int) -> TierEntry:
        name = _experts_name(layer)
        if self._writer is None:
            assert self._found is not None
            self._behind.skip(name)
            return self._found.index.entries[name]
        first = self._expert(layer, 0)
        blocks = self._expert_blocks(layer, first)
        return self._writer.add(name, expert_forms(*first), blocks)

    def _expert_blocks(self, layer: int, first: Matrices) -> Iterator[Sequence[memoryview]]:
        yield [matrix_bytes(matrix) for matrix in first]
        for number in range(1, self._behind.num_experts()):
            yield [matrix_bytes(matrix) for matrix in self._expert(layer, number)]

    def _expert(self, layer: int, number: int) -> Matrices:
        only = number, number + 1
        return self._behind.experts(layer, "gate", "up", only=only), self._behind.experts(layer, "down", only=only)

    def _is_complete(self, index: TierIndex) -> bool:
        """Whether all that is placed on disk is there; more does no harm."""
        experts = {_experts_name(layer) for layer in _expert_layers(self.spec)} if self._placed.disk_experts else set[str]()
        local = {name for name in index.entries if name.endswith(EXPERTS)}
        return self._units <= index.entries.keys() and (not experts or bool(local & experts))


Matrices = tuple[Tensor | Panels, Tensor | Panels]
EXPERTS = ".experts"


def _experts_name(layer: int) -> str:
    return f"layers.{layer}{EXPERTS}"


def _expert_layers(spec: ModelSpec) -> list[int]:
    return [index for index, layer in enumerate(spec.layers) if hasattr(layer.feed_forward, "num_experts")]


PARALLEL = (Wiring.PARALLEL, Wiring.PARALLEL_ONE_NORM)
IN_MIXER = ("q+k+v", "q", "q_a", "q_b", "kv_a", "o")
IN_FEED_FORWARD = ("gate+up", "up", "down")


def _use_order(spec: ModelSpec, name: str) -> tuple[int, ...]:
    """As a layer runs: parallel layers compute the feed-forward first (runtime/nn/layer.py)."""
    _, number, part = name.split(".", 2)
    module, _, matrix = part.rpartition(".")
    is_mixer = module == "mixer"
    first = is_mixer is not (spec.layers[int(number)].wiring in PARALLEL)
    places = IN_MIXER if is_mixer else IN_FEED_FORWARD
    return int(number), 0 if first else 1, places.index(matrix)
