"""A source of weights (core.ports.Weights) in which a part of every dense feed-forward goes to pinned host memory as it is loaded."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import msgspec
import torch
from torch import Tensor

from windlass.core.fused import slice_blocks
from windlass.core.tiers.demand import unit_name
from windlass.core.tiers.device import DeviceSplit
from windlass.core.tiers.stats import TierStats
from windlass.core.tiers.values import Speeds, TierPlacement
from windlass.errors import Impossible
from windlass.runtime.kernels.cuda.layout import Tiles
from windlass.runtime.kernels.cuda.sliced import CpuShares, HostSlices, SlicedTiles, StagedSlices
from windlass.runtime.kernels.cuda.tiered import FAILED_AT, ITEM_BYTES, ITEMS_AT, MAX_ITEMS, MAX_ROWS, STATE_WORDS, mailbox_bytes
from windlass.runtime.offload.device.pinned import PinnedMemory
from windlass.runtime.offload.device.share import CpuShare
from windlass.runtime.offload.device.speeds import measured_speeds
from windlass.runtime.offload.device.weights import check_answered
from windlass.runtime.offload.weights import ExpertSource
from windlass.units import format_bytes

ROWS = (1, 2, 8, 16, 32, 64)
"""Rows of steps for which the CPU is measured."""
QUESTIONS = 3


class DenseTieredWeights:
    def __init__(self, behind: ExpertSource, split: DeviceSplit) -> None:
        """`split`: of the slices of every layer."""
        if not getattr(behind, "tiled", False):
            raise Impossible(
                "weights in host memory beside a GPU need the fused kernels, which do not support this model or its storage"
            )
        self.device, self.dtype, self.spec, self.tiled = behind.device, behind.dtype, behind.spec, True
        self._behind, self._split = behind, split
        self._pinned = PinnedMemory(behind.device)
        self._layers: dict[str, SlicedTiles] = {}
        self._host: list[HostSlices] = []
        self._mailbox = self._state = torch.empty(0)
        self._kept: list[Tensor] = []
        """Gate and up, and down, of the slices on the device."""
        self._staged: StagedSlices | None = None
        self._slice: tuple[Tiles, Tiles] | None = None
        self.speeds: Speeds | None = None

    # --- core.ports.Weights

    def matrix(self, *names: str) -> Any:
        """The same object for gate and up as for down."""
        unit = unit_name(names) or ""
        layer, _, part = unit.rpartition(".")
        if not layer.endswith(".ffn"):
            return self._behind.matrix(*names)
        tiles = self._behind.matrix(*names)
        if part == "gate+up":
            return self._first_half(layer, tiles)
        return self._second_half(layer, tiles)

    def dense_matrix(self, *names: str) -> Any:
        return self._behind.dense_matrix(*names)

    def vector(self, *names: str) -> Any:
        return self._behind.vector(*names)

    def expert_vectors(self, layer: int, *parts: str) -> Any:
        return self._behind.expert_vectors(layer, *parts)

    def experts(self, layer: int, *parts: str) -> Any:
        return self._behind.experts(layer, *parts)

    # --- what is elsewhere

    def finish(self) -> DenseTier:
        assert self._staged is not None and self._slice is not None
        gate_up, down = ([getattr(layer, name) for layer in self._host] for name in ("gate_up", "down"))
        share = None
        if self._split.in_host and self._split.share != 0.0 and (self.speeds is None or self.speeds.host):
            share = CpuShare(gate_up, down, self._slice[0], self._mailbox, self._slice[1].tile_blocks)
        count = self._split.in_host
        taken = seconds_of_rows(share, self._mailbox, len(gate_up), count) if share else {}
        if self.speeds is None:
            speeds = Speeds(host=self._split.share or 0.0, link=1 - (self._split.share or 0.0), disk=0.0)
        else:  # what was measured before may have been in caches
            host = min(self.speeds.host, count * self.slice_bytes / taken[1]) if taken else 0.0
            speeds = self.speeds = msgspec.structs.replace(self.speeds, host=host)
        shares = cpu_shares(speeds, {rows: max(time / taken[1], 1.0) for rows, time in taken.items()}, count)
        self.set_shares(shares)
        self._state[0] = self._mailbox[:4].view(torch.int32)[0]  # the number of the last question
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # of layers as they were loaded
        sizes = [self._split.num_layers * count * self.slice_bytes for count in (self._split.on_device, self._split.in_host)]
        return DenseTier(self._split, (sizes[0], sizes[1]), shares, self._mailbox, self._pinned, share)

    @property
    def slice_bytes(self) -> int:
        assert self._slice is not None
        return sum(tiles.num_bytes for tiles in self._slice)

    def set_shares(self, shares: CpuShares) -> None:
        for layer in self._layers.values():
            layer.shares = shares

    def abort(self) -> None:
        self._pinned.close()

    def _first_half(self, layer: str, gate_up: Tiles) -> SlicedTiles:
        """Slices on the device first, then those in host memory."""
        if self._slice is None:
            self._begin(*_first_slice(gate_up))
        assert self._slice is not None
        sample, down = self._slice
        tiles = sample.num_tiles
        kept = self._split.on_device * tiles
        host = self._host_slices(sample, down)
        host.gate_up.copy_(gate_up.data[:, kept:].view_as(host.gate_up))
        self._host.append(host)
        if self._staged is None:
            self._staged = StagedSlices(self._host, sample, down)
        device: Tiles | None = None
        if kept:
            device = replace(gate_up, data=self._kept[0][len(self._layers)][None], rows=kept * 16)
            device.data.copy_(gate_up.data[:, :kept])
        made = SlicedTiles(
            len(self._layers), device, None, self._staged, self._state, self._mailbox, CpuShares(()), 0
        )  # fmt: skip
        self._layers[layer] = made
        return made

    def _second_half(self, layer: str, down: Tiles) -> SlicedTiles:
        made, host = self._layers[layer], self._host[-1]
        if down.data.shape[3] != host.down.shape[3]:
            raise Impossible("gate, up and down in groups of unlike sizes cannot be kept in host memory beside a GPU")
        blocks = host.down.shape[2]
        kept = self._split.on_device * blocks
        for number in range(self._split.in_host):
            first = kept + number * blocks
            host.down[number].copy_(down.data[0, :, first : first + blocks].contiguous())
        if kept:
            made.down = replace(down, data=self._kept[1][made.layer][None], inputs=kept * 128)
            made.down.data.copy_(down.data[:, :, :kept])
        made.num_bytes = self._split.num_experts * self.slice_bytes
        return made

    def _begin(self, gate_up: Tiles, down: Tiles) -> None:
        if self._split.share is None:
            self.speeds = measured_speeds(gate_up, down, by_copies=True)
        self._slice = gate_up, down
        # One piece for all layers: pieces among those that are loaded and freed again would leave gaps.
        layers, count = self._split.num_layers, self._split.on_device
        (_, tiles, inputs, size), (_, rows, blocks, _) = gate_up.data.shape, down.data.shape
        shapes = [(layers, count * tiles, inputs, size), (layers, rows, count * blocks, size)]
        self._kept = [torch.empty(shape, dtype=torch.uint8, device=gate_up.data.device) for shape in shapes]
        self._mailbox = self._pinned.piece(mailbox_bytes(gate_up.inputs))
        self._state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=gate_up.data.device)

    def _host_slices(self, gate_up: Tiles, down: Tiles) -> HostSlices:
        count = self._split.in_host
        shapes = [(count, *tiles.data.shape[1:]) for tiles in (gate_up, down)]
        sizes = [prod(shape) for shape in shapes]
        first, second = self._pinned.piece(sum(sizes)).split(sizes)
        return HostSlices(first.view(shapes[0]), second.view(shapes[1]))


def _first_slice(gate_up: Tiles) -> tuple[Tiles, Tiles]:
    """Of a layer, for its shape: gate and up, and a down matrix without numbers."""
    blocks, hidden = slice_blocks(gate_up.rows // 256), gate_up.inputs
    tiles = blocks * 16  # a tile of gate and up has eight intermediate outputs
    shape = 1, hidden // 16, blocks, gate_up.block_bytes
    down = torch.empty(shape, dtype=torch.uint8, device=gate_up.data.device)
    low = replace(gate_up, data=gate_up.data[:, :tiles].clone(), rows=tiles * 16)
    return low, Tiles(down, hidden, blocks * 128, gate_up.group)


def seconds_of_rows(share: CpuShare, mailbox: Tensor, layers: int, num_slices: int) -> dict[int, float]:
    """Of the CPU, for all slices of a layer and steps of so many rows, the link idle."""

    def seconds(rows: int) -> float:
        groups = -(-rows // 8)
        slices = min(num_slices, MAX_ITEMS // groups)
        items = mailbox[ITEMS_AT : ITEMS_AT + slices * groups * ITEM_BYTES].view(torch.int32).view(slices * groups, -1)
        for number, item in enumerate(items):
            first = number % groups * 8
            item[0], item[1] = number // groups, min(8, rows - first)
            item[2:10] = torch.arange(first, first + 8)
            item[10:18] = torch.ones(8).view(torch.int32)
        taken = list[float]()
        for question in range(QUESTIONS):
            head = torch.tensor([rows, slices * groups, question % layers], dtype=torch.int32)
            mailbox[4:16].view(torch.int32).copy_(head)
            before = share.counts.busy_seconds
            share.ask()
            taken.append(share.counts.busy_seconds - before)
        return min(taken) * num_slices / slices

    return {rows: seconds(rows) for rows in ROWS}


def cpu_shares(speeds: Speeds, costs: dict[int, float], slices: int) -> CpuShares:
    """Of so many slices of a layer, those that the CPU computes, so that it and the link end together. `costs`: of more rows over one."""

    def share(rows: int, cost: float) -> int:
        """A question has room for so many items of eight rows."""
        even = round(slices * speeds.host / (speeds.host + speeds.link * cost))
        return min(even, MAX_ITEMS // -(-rows // 8))

    return CpuShares(tuple((rows, share(rows, cost)) for rows, cost in sorted(costs.items())))


class DenseTier:
    """What holds the slices outside of the device, and answers for them, as long as the decoder lives."""

    reads_all = True
    """Of the weights, in every step."""

    def __init__(
        self,
        split: DeviceSplit,
        sizes: tuple[int, int],
        shares: CpuShares,
        mailbox: Tensor,
        pinned: PinnedMemory,
        share: CpuShare | None,
    ) -> None:
        """`sizes`: bytes of feed-forwards on the device and in host memory."""
        self.split, self.share, self.shares, self._sizes = split, share, shares, sizes
        self._mailbox, self._pinned = mailbox, pinned
        self.promotions = None
        self.speeds: Speeds | None = None
        self.placed: TierPlacement | None = None
        """With the predicted step; set by who made the plan."""
        self._failed = mailbox[FAILED_AT : FAILED_AT + 4].view(torch.int32)

    def after_step(self) -> None:
        check_answered(self._failed)

    @property
    def line(self) -> str:
        """For the user."""
        device, host = map(format_bytes, self._sizes)
        one, many = (self.shares.of(rows) / max(self.split.in_host, 1) for rows in (1, MAX_ROWS))
        return (
            f"{self.split.on_device / self.split.num_experts:.0%} of every feed-forward on the device ({device}), the rest in host memory "
            f"({host}), of which the CPU computes {one:.0%} for one sequence, {many:.0%} for {MAX_ROWS}"
        )

    def stats(self) -> TierStats:
        return TierStats(device_bytes=self._sizes[0], host_bytes=self._sizes[1])

    def measure(self) -> Speeds:
        """Link and CPU, each beside the other, as they were measured before loading."""
        return self.speeds or Speeds(host=0.0, disk=0.0)

    def close(self) -> None:
        if self.share is not None:
            self.share.close()
        self._pinned.close()
