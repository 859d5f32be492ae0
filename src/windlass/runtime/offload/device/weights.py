"""A source of weights (core.ports.Weights) in which some experts go to pinned host memory as they are loaded, and some to a file below it."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import msgspec
import torch
from torch import Tensor

from windlass.core.tiers.device import DeviceSplit
from windlass.core.tiers.placement import spread_numbers
from windlass.core.tiers.stats import TierStats
from windlass.core.tiers.values import Speeds, TierPlacement
from windlass.errors import Error, Impossible
from windlass.runtime.kernels.cuda import layout
from windlass.runtime.kernels.cuda.ahead import lane_on
from windlass.runtime.kernels.cuda.layout import Tiles
from windlass.runtime.kernels.cuda.tiered import (
    DISK_PLACES,
    FAILED_AT,
    NUM_TOTALS,
    PATIENCE_SECONDS,
    STATE_WORDS,
    ExpertSlots,
    TieredTiles,
    mailbox_bytes,
    share_tiles,
)
from windlass.runtime.offload.device.copies import HostExperts, StreamedLayers
from windlass.runtime.offload.device.disk import DiskBelow, DiskExpertsFile, DiskPlace
from windlass.runtime.offload.device.pinned import PinnedMemory
from windlass.runtime.offload.device.promote import Promotions
from windlass.runtime.offload.device.prompts import LayerReads
from windlass.runtime.offload.device.share import CpuShare
from windlass.runtime.offload.device.speeds import measured_speeds
from windlass.runtime.offload.tiers.reader import sequential_speed
from windlass.runtime.offload.weights import ExpertSource
from windlass.units import format_bytes

PIECE = 16
"""Experts that are loaded at a time."""
MEASURED_SECONDS = 1.0
"""Of reading the file by itself."""


class _Memory:
    """All of it, once the shape of an expert is known."""

    def __init__(self, split: DeviceSplit, gate_up: Tiles, down: Tiles, file: DiskExpertsFile | None) -> None:
        device = gate_up.data.device
        self.slots = ExpertSlots(
            _like(gate_up, split.num_slots), _like(down, split.num_slots), split.staging, split.in_host, split.on_disk
        )
        for tiles in (self.slots.gate_up, self.slots.down):
            tiles.data[split.spare.stop :].zero_()
        self.pinned = PinnedMemory(device)
        self.share_blocks = split.share_blocks(down.tile_blocks)
        self.host = [self._host_experts(split.in_host, gate_up, down) for _ in range(split.num_layers)]
        self.mailbox = self.pinned.piece(mailbox_bytes(gate_up.inputs))
        self.state = torch.zeros(STATE_WORDS + split.num_experts, dtype=torch.int32, device=device)
        places, slots = _tables(split)
        self.first_places: list[list[int]] = places.tolist()
        """Of the table as it begins."""
        self.table, self.whole_table = places.to(device), slots.to(device)
        self.uses = torch.zeros_like(self.table)
        self.totals = torch.zeros(NUM_TOTALS, dtype=torch.int64, device=device)
        self.lane = lane_on(device)
        self.fetched_bytes = 0
        """Of an expert in host memory: the device's part."""
        if split.in_host:
            first = self.host[0]
            self.fetched_bytes = first.gate_up[0, share_tiles(self.share_blocks) :].numel() + first.down[0].numel()
        self.disk = None if file is None else DiskBelow(file, split, gate_up, down, self.pinned)
        self.reads = None if self.disk is None else LayerReads(self.disk, split.num_layers)

    @property
    def patience_seconds(self) -> float:
        return PATIENCE_SECONDS + (0.0 if self.disk is None else self.disk.patience_seconds)

    def _host_experts(self, count: int, gate_up: Tiles, down: Tiles) -> HostExperts:
        _, tiles, blocks, size = down.data.shape
        shapes = [
            (count, *gate_up.data.shape[1:]),
            (count, tiles, self.share_blocks, size),
            (count, tiles, blocks - self.share_blocks, size),
        ]
        sizes = [prod(shape) for shape in shapes]
        parts = self.pinned.piece(sum(sizes)).split(sizes)
        return HostExperts(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))


class DeviceTieredWeights:
    def __init__(self, behind: ExpertSource, split: DeviceSplit, first_layer: int, disk: DiskPlace | None = None) -> None:
        """`first_layer`: the first one with routed experts; all that follow have them too. `disk`: for the experts that the split leaves there."""
        if not getattr(behind, "tiled", False):
            raise Impossible(
                "weights in host memory beside a GPU need the fused kernels, which do not support this model or its storage"
            )
        self.device, self.dtype, self.spec, self.tiled = behind.device, behind.dtype, behind.spec, True
        self._behind, self._split, self._first = behind, split, first_layer
        self._file = DiskExpertsFile(disk, split, first_layer) if disk is not None and split.on_disk else None
        self._memory: _Memory | None = None
        self._layers: dict[int, TieredTiles] = {}
        self._copies: StreamedLayers | None = None
        self.speeds: Speeds | None = None
        """As measured, unless the split says how much the CPU computes."""

    # --- core.ports.Weights

    def matrix(self, *names: str) -> Any:
        return self._behind.matrix(*names)

    def dense_matrix(self, *names: str) -> Any:
        return self._behind.dense_matrix(*names)

    def vector(self, *names: str) -> Any:
        return self._behind.vector(*names)

    def expert_vectors(self, layer: int, *parts: str) -> Any:
        return self._behind.expert_vectors(layer, *parts)

    def experts(self, layer: int, *parts: str) -> Any:
        """The same object for gate and up as for down."""
        if layer not in self._layers:
            self._layers[layer] = self._load(layer)
        return self._layers[layer]

    # --- what is elsewhere

    def finish(self) -> DeviceTier:
        assert self._memory is not None and self._copies is not None
        memory, host = self._memory, self._memory.host
        gate_up, down = [layer.gate_up for layer in host], [layer.down_share for layer in host]
        if memory.disk is not None:
            memory.disk.open()
        cache = None if memory.disk is None else memory.disk.cache
        share = (
            CpuShare(gate_up, down, memory.slots.gate_up, memory.mailbox, memory.share_blocks, disk=cache)
            if memory.share_blocks or cache is not None
            else None
        )
        return DeviceTier(self._split, self._memory, share)

    def in_host_memory(self, layer: int) -> HostExperts:
        """What lies in host memory of a layer that is loaded."""
        assert self._memory is not None
        return self._memory.host[layer - self._first]

    @property
    def was_found(self) -> bool:
        """Whether the file of an earlier run is used."""
        return self._file is not None and self._file.was_found

    def abort(self) -> None:
        if self._file is not None:
            self._file.abort()
        if self._memory is not None:
            if self._memory.disk is not None:
                self._memory.disk.close()
            self._memory.pinned.close()

    def _load(self, layer: int) -> TieredTiles:
        index, split = layer - self._first, self._split
        self._load_disk(layer)
        for first, gate_up, down in self._pieces(layer, split.on_disk, split.num_experts):
            memory = self._ready(gate_up, down)
            places = memory.first_places[index][first:]
            for number, at in enumerate(places[: gate_up.data.shape[0]]):
                if at < 0:
                    memory.host[index].put(-1 - at, gate_up.data[number], down.data[number])
                else:
                    memory.slots.gate_up.data[at].copy_(gate_up.data[number])
                    memory.slots.down.data[at].copy_(down.data[number])
        assert self._memory is not None and self._copies is not None
        memory = self._memory
        host = memory.host[index]
        return TieredTiles(
            index, memory.slots, memory.table[index], memory.whole_table[index], memory.uses[index], memory.totals, host.gate_up,
            host.down, memory.state, memory.mailbox, memory.share_blocks, self._copies, split.shared_slot(index), memory.lane,
            split.nothing_slot, memory.patience_seconds,
        )  # fmt: skip

    def _pieces(self, layer: int, first: int, last: int) -> Iterator[tuple[int, Tiles, Tiles]]:
        for start in range(first, last, PIECE):
            only = start, min(start + PIECE, last)
            gate_up, down = (self._behind.experts(layer, *parts, only=only) for parts in (("gate", "up"), ("down",)))
            yield start, gate_up, down

    def _load_disk(self, layer: int) -> None:
        """The first experts of a layer go to the file, unless they are there."""
        count = self._split.on_disk
        if self._file is None or not count:
            return
        if self._file.was_found:
            if self._memory is None:  # one of them shows what an expert looks like
                for _, gate_up, down in self._pieces(layer, 0, 1):
                    self._ready(gate_up, down)
            self._behind.skip_experts(layer, count)
            return
        self._file.write(layer, self._on_cpu(layer, count))

    def _on_cpu(self, layer: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        for _, gate_up, down in self._pieces(layer, 0, count):
            self._ready(gate_up, down)
            for number in range(gate_up.data.shape[0]):
                yield gate_up.data[number].cpu(), down.data[number].cpu()

    def _ready(self, gate_up: Tiles, down: Tiles) -> _Memory:
        if self._memory is None:
            if self._split.share is None:
                self.speeds = measured_speeds(gate_up, down)
                self._split = self._split._replace(share=self.speeds.cpu_share)
            self._memory = memory = _Memory(self._split, gate_up, down, self._file)
            self._copies = StreamedLayers(memory.host, memory.slots, memory.share_blocks, self._split.on_disk, memory.reads)
        return self._memory


class DeviceTier:
    """What holds the experts outside of the device, and answers for them, as long as the decoder lives."""

    def __init__(self, split: DeviceSplit, memory: _Memory, share: CpuShare | None) -> None:
        self.split, self.share = split, share
        self._memory = memory
        tables = memory.table, memory.whole_table
        moves = split.on_device > 0 and split.in_host > 0 and memory.table.is_cuda
        self.promotions = (
            Promotions(memory.slots, memory.host, tables, memory.uses, list(split.spare), split.off_device) if moves else None
        )
        self.speeds: Speeds | None = None
        self.placed: TierPlacement | None = None
        """With the predicted step; set by who made the plan."""
        self._failed = memory.mailbox[FAILED_AT : FAILED_AT + 4].view(torch.int32)

    @property
    def reads_disk(self) -> bool:
        return self._memory.disk is not None

    def after_step(self) -> None:
        if self._memory.disk is not None and self._memory.reads is not None:
            self._memory.disk.cache.check()
            self._memory.reads.sweep()
        check_answered(self._failed, self._memory.patience_seconds)
        if self.promotions is not None:
            self.promotions.after_step()

    @property
    def line(self) -> str:
        """For the user."""
        split, (device, host) = self.split, self._sizes()
        computed = self._memory.share_blocks / self._memory.slots.down.tile_blocks
        parts = [f"{split.on_device} of {split.num_experts} experts of each layer on the device ({format_bytes(device)})"]
        if split.in_host or not split.on_disk:
            parts.append(f"{split.in_host} in host memory ({format_bytes(host)}), where the CPU computes {computed:.0%} of them")
        return ", ".join(parts if self._memory.disk is None else [*parts, self._disk_line(self._memory.disk)])

    def _disk_line(self, disk: DiskBelow) -> str:
        split, size = self.split, self.split.num_layers * self.split.on_disk * disk.block_bytes
        return (
            f"{split.on_disk} on disk ({format_bytes(size)} in {disk.name}), of which {split.cache_slots:,} of all layers' "
            f"{split.num_layers * split.on_disk:,} are in host memory at a time ({format_bytes(disk.slots.numel())})"
        )

    def _sizes(self) -> tuple[int, int]:
        """Bytes of experts whose home is the device or host memory."""
        expert = sum(tiles.data[0].numel() for tiles in (self._memory.slots.gate_up, self._memory.slots.down))
        return self.split.num_layers * self.split.on_device * expert, self.split.num_layers * self.split.in_host * expert

    def stats(self) -> TierStats:
        device_bytes, host_bytes = self._sizes()
        hits, misses, foreseen, guessed, right, begun, left_out = self._memory.totals.tolist()
        stats = TierStats(
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            expert_slots=self.split.num_layers * self.split.on_device,
            num_experts=self.split.num_layers * self.split.num_experts,
            expert_hits=hits,
            expert_misses=misses,
            expert_foreseen=foreseen,
            expert_guesses=guessed,
            expert_guessed_right=right,
            wasted_bytes=max(0, begun * self._memory.fetched_bytes - left_out),
        )
        return stats if self._memory.disk is None else self._with_disk(stats, self._memory.disk)

    def _with_disk(self, stats: TierStats, disk: DiskBelow) -> TierStats:
        reads = disk.counts
        return msgspec.structs.replace(
            stats,
            host_bytes=stats.host_bytes + disk.slots.numel() + disk.ring.numel(),
            disk_bytes=self.split.num_layers * self.split.on_disk * disk.block_bytes,
            expert_reads=disk.cache.counts.misses,
            read_bytes=reads.num_bytes,
            read_seconds=reads.busy_seconds,
        )

    def burst_speed(self, experts: int) -> float:
        """Bytes per second of the disk where layers miss so many experts at a time; 0: there is none. Before the first step."""
        return 0.0 if self._memory.disk is None else self._memory.disk.burst_speed(experts)

    def measure(self) -> Speeds:
        """Link and CPU, each beside the other, as they were measured before loading: there may be no room for it now. The disk by itself, now."""
        speeds, disk = self.speeds or Speeds(host=0.0, disk=0.0), self._memory.disk
        if disk is None:
            return speeds
        return msgspec.structs.replace(speeds, disk=sequential_speed(disk.reader, disk.num_file_bytes, MEASURED_SECONDS))

    def close(self) -> None:
        if self.share is not None:
            self.share.close()
        memory = self._memory
        if memory.disk is not None and memory.reads is not None:
            memory.reads.abandon()
            memory.disk.close()
        memory.pinned.close()


def check_answered(failed: Tensor, patience_seconds: float = PATIENCE_SECONDS) -> None:
    """`failed`: the word of the mailbox that the device sets."""
    if int(failed):
        raise Error(
            f"the CPU did not answer for its part of a layer within {patience_seconds:.0f} s; the engine must be started again"
        )


def _like(tiles: Tiles, count: int) -> Tiles:
    return layout.empty(count, tiles.rows, tiles.inputs, tiles.group, paired=tiles.paired, device=tiles.data.device)


def _tables(split: DeviceSplit) -> tuple[Tensor, Tensor]:
    """int32 [layers, experts + 1]: see TieredTiles. The first experts are on disk: a file that holds more of them serves a split with fewer."""
    in_host = {split.on_disk + at for at in spread_numbers(split.num_experts - split.on_disk, split.in_host)}
    table = torch.zeros(split.num_layers, split.num_experts + 1, dtype=torch.int32)
    whole = table.clone()
    for layer in range(split.num_layers):
        next_host = next_slot = 0
        staged = split.staging + layer % 2 * split.off_device
        for expert in range(split.num_experts):
            if expert < split.on_disk:
                table[layer, expert] = -1 - DISK_PLACES - expert
                whole[layer, expert] = staged + split.in_host + expert
            elif expert in in_host:
                table[layer, expert] = -1 - next_host
                whole[layer, expert] = staged + next_host
                next_host += 1
            else:
                table[layer, expert] = whole[layer, expert] = layer * split.on_device + next_slot
                next_slot += 1
        table[layer, -1] = whole[layer, -1] = split.shared_slot(layer)
    return table, whole
