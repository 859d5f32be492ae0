"""A dense feed-forward of which a part lies in host memory, in slices of its intermediate outputs, beside a part on the device.

For steps of few rows the CPU computes the first slices where they lie, and the others are copied to the device; for steps of many rows all are
copied. What is needed is known before a step, so copies run ahead of it. `runtime/offload/device` fills the memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.runtime.kernels.cuda import driver
from windlass.runtime.kernels.cuda.ahead import BUFFERS, CopyAhead, copy_rows, lane_on
from windlass.runtime.kernels.cuda.layout import Tiles
from windlass.runtime.kernels.cuda.tiered import ITEMS_AT, MAX_ITEMS, ROWS_AT, add_answer, await_answer


class HostSlices(NamedTuple):
    """Of a layer; pinned, contiguous."""

    gate_up: Tensor
    """uint8 [slices, tiles, blocks, block bytes]"""
    down: Tensor
    """uint8 [slices, tiles, blocks of a slice, block bytes]"""


class StagedSlices:
    """Copies the slices of one layer after another to the device, two layers ahead: a step's layers take turns in two buffers."""

    def __init__(self, host: Sequence[HostSlices], gate_up: Tiles, down: Tiles) -> None:
        """`gate_up`, `down`: a slice, for its shape."""
        device = gate_up.data.device
        self._host, self._gate_up, self._down = host, gate_up, down
        self._memory = [[torch.empty_like(part, device=device) for part in host[0]] for _ in range(BUFFERS)]
        self._ahead = CopyAhead(host, lane_on(device))

    @property
    def num_slices(self) -> int:
        return self._host[0].gate_up.shape[0]

    def buffer(self, layer: int, first: int) -> tuple[Tiles, Tiles]:
        """Where the slices from `first` on of that layer come to lie, as two matrices."""
        count, (gate_up, down) = self.num_slices - first, self._memory[layer % BUFFERS]
        tiles, blocks, size = self._down.data.shape[1:]
        low = gate_up[:count].view(1, -1, *gate_up.shape[2:])
        high = down.view(-1)[: count * tiles * blocks * size].view(1, tiles, count * blocks, size)
        return (
            replace(self._gate_up, data=low, rows=count * self._gate_up.rows),
            replace(self._down, data=high, inputs=count * self._down.inputs),
        )

    def before(self, layer: int, first: int) -> None:
        """Kernels that are launched from now on find the layer's slices from `first` on in its buffer."""
        self._ahead.before(layer, partial(self._copy, first))

    def after(self, layer: int, first: int) -> None:
        self._ahead.after(layer, partial(self._copy, first))

    def abandon(self) -> None:
        """After a step that did not come to its end."""
        self._ahead.abandon()

    def _copy(self, first: int, layer: int) -> None:
        host, (gate_up, down) = self._host[layer], self.buffer(layer, first)
        gate_up.data.view_as(host.gate_up[first:]).copy_(host.gate_up[first:], non_blocking=True)
        blocks = self._down.tile_blocks
        for number in range(self.num_slices - first):
            copy_rows(host.down[first + number :][:1], down.data[:, :, number * blocks : (number + 1) * blocks])


@dataclass(frozen=True)
class CpuShares:
    """How many slices of a layer the CPU computes, by rows of a step."""

    slices: tuple[tuple[int, int], ...]
    """(up to so many rows, slices), in order; beyond the last, none."""

    def of(self, rows: int) -> int:
        return next((count for most, count in self.slices if rows <= most), 0)


@dataclass
class SlicedTiles:
    """The feed-forward of one layer; stands for its gate and up, and for its down matrix."""

    layer: int
    gate_up: Tiles | None
    """On the device; None: nothing is."""
    down: Tiles | None
    staged: StagedSlices
    state: Tensor
    """int32, of all layers (sources/offload.cu)."""
    mailbox: Tensor
    """uint8, pinned, of all layers."""
    shares: CpuShares
    num_bytes: int
    """Wherever they are."""

    def ask(self, x: Tensor, slices: int) -> None:
        """The CPU computes the first slices with x, bf16 [rows, hidden]."""
        run = driver.kernel("offload.cu", "PPPPPIIII", "ask_slices", packed=False)
        rows, hidden = x.shape
        base = self.mailbox.data_ptr()
        assert slices * -(-rows // 8) <= MAX_ITEMS
        run((1,), 1024, x, self.state, base, base + ITEMS_AT, base + ROWS_AT, rows, hidden, slices, self.layer)

    def collect(self, h: Tensor) -> None:
        """Adds the CPU's part to h, fp32 [rows, hidden]."""
        add_answer(self.state, self.mailbox, h)

    def abandon(self) -> None:
        """After a step that did not come to its end."""
        self.staged.abandon()
        await_answer(self.mailbox)
