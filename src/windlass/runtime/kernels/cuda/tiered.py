"""Routed experts of which some lie in host memory, in the same tiles as on the device.

All slots of device memory are one array (`ExpertSlots`), and kernels take slots for experts. Of an expert in host memory the device reads a part
over the link into a staging slot, and the CPU computes the rest where it lies: the first `share_blocks` * 128 of its intermediate outputs. In
staging slots the CPU's part stays zero, so that kernels need not know. Experts below host memory, in a file, are the CPU's alone: for all of them the
device computes with one slot that is zero. `runtime/offload/device` fills the memory and moves experts.

In steps of few rows a layer also guesses what the next one will choose (route.Guess): the CPU is told, and the device's part is fetched on a stream
of its own while other kernels run, into staging slots that layers have in turn. What was not guessed is fetched as before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from windlass.core.tiers.guesses import MAX_GUESSES, ahead_slots, most_guesses
from windlass.runtime.kernels.cuda import driver
from windlass.runtime.kernels.cuda.ahead import BUFFERS, Lane
from windlass.runtime.kernels.cuda.layout import Tiles
from windlass.runtime.kernels.cuda.route import Routes

FETCH_BLOCKS = 64
"""A few of its processors are enough to fill the link."""
AHEAD_BLOCKS, FEW_AHEAD_BLOCKS = 48, 12
"""Of the kernel that fetches ahead, one to a processor: for one row, and for more, whose products need processors for themselves alone."""
PATIENCE_SECONDS = 20.0
"""For an answer of the CPU, beside the time that reading from a disk takes."""
DISK_PLACES = 2**20
"""Places from here on are in a file (runtime/kernels/native/tiles/mailbox.h, sources/offload.cu)."""
ITEM_BYTES = 72
ITEMS_AT, MAX_ITEMS = 4096, 640
ROWS_AT = -(-(ITEMS_AT + MAX_ITEMS * ITEM_BYTES) // 4096) * 4096
"""Offsets in the mailbox; sums follow the rows (runtime/kernels/native/tiles/share.cpp, sources/offload.cu)."""
STATE_WORDS, FETCHED = 16 + 4 * MAX_GUESSES, 3
"""Of the state: words before the places of experts, and which of them is the number of these."""
NUM_TOTALS = 7
"""Counted on the device: uses of experts found there, and of others; of these, such that were guessed. Experts guessed, right ones; wrong ones whose
fetching began; bytes of these that were left out in the end."""
ANSWERED_AT, FAILED_AT = 64, 68
"""In the mailbox: the number of the last question that was answered; and a word that is set where an answer never came."""
TOLD_AT, GUESSES_AT = 128, 192
"""In the mailbox: the number of the last guess, its layer and how many experts; their places."""
MAX_EXPERTS = 1024
MAX_ROWS = 64


def sums_at(hidden: int) -> int:
    return ROWS_AT + -(-MAX_ROWS * hidden * 2 // 4096) * 4096


def mailbox_bytes(hidden: int) -> int:
    return sums_at(hidden) + MAX_ROWS * hidden * 4


@dataclass(frozen=True)
class ExpertSlots:
    """Device memory of all layers' experts: slots of experts that live there, then staging slots."""

    gate_up: Tiles
    down: Tiles
    staging: int
    """The first staging slot."""
    in_host: int = 0
    """Experts of a layer in host memory."""
    on_disk: int = 0
    """In a file: there are staging slots for twice as many as in both."""

    @property
    def num_ahead(self) -> int:
        """Slots for experts that are fetched ahead, of each of two layers."""
        return ahead_slots(self.in_host)

    def first_ahead(self, layer: int) -> int:
        return self.staging + self.half + layer % BUFFERS * self.num_ahead

    @property
    def half(self) -> int:
        """Of the staging slots: of one layer in steps of many rows. In others the first half is for what is fetched."""
        return self.in_host + self.on_disk


class LayerCopies(Protocol):
    """Copies whole layers to the device, ahead of steps of many rows."""

    def before(self, layer: int) -> None:
        """Returns when kernels that are launched from now on find the layer's experts in their slots."""
        ...

    def after(self, layer: int) -> None: ...

    def abandon(self) -> None:
        """After a step that did not come to its end."""
        ...


@dataclass(frozen=True)
class TieredTiles:
    """The routed experts of one layer; stands for their gate and up, and for their down matrices."""

    layer: int
    """Among the layers with routed experts."""
    slots: ExpertSlots
    table: Tensor
    """int32 [experts + 1] on the device: slot, or -1 - place in host memory or, from DISK_PLACES on, in a file; the last is the shared expert."""
    whole_table: Tensor
    """The same with staging slots for experts in host memory: for steps of many rows, for which they are copied whole."""
    uses: Tensor
    """int32 [experts + 1]: rows that chose each, in steps of few rows."""
    totals: Tensor
    """int64 [NUM_TOTALS], of all layers."""
    host_gate_up: Tensor
    """uint8 [experts in host memory, ...], pinned."""
    host_down: Tensor
    """Their tiles' blocks after the CPU's, pinned: what the device reads of them in steps of few rows."""
    state: Tensor
    """int32, of all layers (sources/offload.cu)."""
    mailbox: Tensor
    """uint8, pinned, of all layers."""
    share_blocks: int
    """Of the intermediate outputs of an expert in host memory, in blocks of 128: the CPU's part."""
    copies: LayerCopies | None
    """None: only for steps of few rows."""
    shared_slot: int
    lane: Lane | None = None
    """Of all layers: where guessed experts are fetched. None: there are only shapes."""
    nothing_slot: int = -1
    """Stays zero, for experts in a file; negative: there are none."""
    patience_seconds: float = PATIENCE_SECONDS
    """For an answer of the CPU."""

    @property
    def num_experts(self) -> int:
        return self.table.shape[0] - 1

    @property
    def num_bytes(self) -> int:
        """Of all experts, wherever they are, gate, up and down."""
        return self.num_experts * sum(tiles.data[0].numel() for tiles in (self.slots.gate_up, self.slots.down))

    def set_shared(self, gate_up: Tiles, down: Tiles) -> tuple[Tiles, Tiles]:
        """Copies the shared expert to its slot, and returns it as it lies there."""
        at = self.shared_slot, self.shared_slot + 1
        parts = self.slots.gate_up.part(*at), self.slots.down.part(*at)
        for part, given in zip(parts, (gate_up, down), strict=True):
            part.data.copy_(given.data)
        return parts

    @property
    def fetches(self) -> bool:
        """Whether the device has a part in experts of host memory."""
        return self.share_blocks < self.slots.down.tile_blocks

    @property
    def fetched_bytes(self) -> int:
        """Of an expert: the device's part."""
        gate_up, down = self.slots.gate_up, self.slots.down
        return self._from_share(gate_up) + down.num_tiles * self._down_part

    def most_guesses(self, rows: int) -> int:
        """Of this layer's experts, by the one before it."""
        if self.num_experts > MAX_EXPERTS:
            return 0
        return most_guesses(rows, self.slots.in_host, self.fetched_bytes)

    def place(
        self,
        x: Tensor,
        routes: Routes,
        following: TieredTiles | None = None,
        guessed: Tensor | None = None,
        *,
        foreseen: bool = False,
    ) -> None:
        """Experts of the items become slots; the CPU is asked for its part of those elsewhere. x bf16 [rows, hidden].

        `guessed`: what the `following` layer would choose, int32 [rows, active]. `foreseen`: the layer before has guessed for this one.
        """
        run = driver.kernel("offload.cu", "PPPPPPPPPPPPPPPIIIIIIIIIIII", "place", packed=False)
        rows, hidden = x.shape
        base = self.mailbox.data_ptr()
        assert routes.item_rows.shape[1] == 8 and routes.item_expert.shape[0] <= MAX_ITEMS
        guess = (None, None, 0) if following is None else (guessed, following.table, following.most_guesses(rows))
        run(
            (1,), 1024, routes.num_items, routes.item_expert, routes.item_rows, routes.item_places, routes.weights, x, self.table,
            self.uses, self.totals, self.state, base, base + ITEMS_AT, base + ROWS_AT, *guess[:2], rows, hidden, routes.num_active,
            routes.num_active + routes.num_shared, self.slots.staging, self.layer, int(self.share_blocks > 0), guess[2],
            int(self.fetches), int(foreseen), self.slots.first_ahead(self.layer), max(self.nothing_slot, 0),
        )  # fmt: skip

    def fetch(self, *, foreseen: bool = False) -> None:
        """The device's part of the experts that `place` found in host memory. `foreseen`: waits for those that were fetched ahead."""
        if not self.fetches:
            return
        if foreseen and self.lane is not None and not driver.is_collecting():
            self.lane.wait(self.layer % BUFFERS)
        gate_up, down = self.slots.gate_up, self.slots.down
        run = driver.kernel("offload.cu", "PPPPPQQQIII", "fetch", packed=False)
        run(
            (FETCH_BLOCKS,), 256, self.state, self.host_gate_up, self.host_down, gate_up.data, down.data,
            gate_up.num_tiles * gate_up.tile_bytes, share_tiles(self.share_blocks) * gate_up.tile_bytes, down.num_tiles * down.tile_bytes,
            down.tile_bytes, self._down_part, self.slots.staging,
            # After kernels of two streams: both have to be over, which a dependent launch promises of one.
            dependent=False if foreseen else None,
        )  # fmt: skip

    def fetch_ahead(self, rows: int) -> None:
        """The device's part of the experts that the layer before has guessed, beside what is launched from now on."""
        if not self.fetches:
            return
        buffer = self.layer % BUFFERS
        if self.lane is None or driver.is_collecting():
            self._run_ahead(rows)
            return
        self.lane.mark_used(buffer)
        self.lane.run(buffer, lambda: self._run_ahead(rows))

    def _run_ahead(self, rows: int) -> None:
        gate_up, down = self.slots.gate_up, self.slots.down
        run = driver.kernel("offload.cu", "PPPPPPQQQIIIII", "ahead", packed=False)
        run(
            (AHEAD_BLOCKS if rows == 1 else FEW_AHEAD_BLOCKS,), 128, self.state, self.totals, self.host_gate_up, self.host_down,
            gate_up.data, down.data, gate_up.num_tiles * gate_up.tile_bytes, share_tiles(self.share_blocks) * gate_up.tile_bytes,
            down.num_tiles * down.tile_bytes, up_run(self._from_share(gate_up), gate_up.block_bytes), down.tile_bytes, self._down_part,
            self.slots.first_ahead(self.layer), self.layer % BUFFERS, dependent=False,
        )  # fmt: skip

    @property
    def _down_part(self) -> int:
        """Of a tile of down, the device's bytes."""
        down = self.slots.down
        return (down.tile_blocks - self.share_blocks) * down.block_bytes

    def _from_share(self, gate_up: Tiles) -> int:
        """Bytes of gate and up after the CPU's part."""
        return (gate_up.num_tiles - share_tiles(self.share_blocks)) * gate_up.tile_bytes

    def collect(self, h: Tensor) -> None:
        """Adds the CPU's part to h, fp32 [rows, hidden]."""
        if self.share_blocks or self.nothing_slot >= 0:
            add_answer(self.state, self.mailbox, h, self.patience_seconds)

    def abandon(self) -> None:
        """After a step that did not come to its end."""
        if self.copies is not None:
            self.copies.abandon()
        if self.lane is not None:
            self.lane.settle()
        await_answer(self.mailbox, self.patience_seconds)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within, kernels find all experts of the layer on the device."""
        assert self.copies is not None
        self.copies.before(self.layer)
        yield
        self.copies.after(self.layer)

    def use_whole(self, routes: Routes) -> Routes:
        """Experts of the items become slots, all of which hold whole experts."""
        run = driver.kernel("offload.cu", "PPP", "remap", packed=False)
        run((-(-routes.item_expert.shape[0] // 256),), 256, routes.num_items, routes.item_expert, self.whole_table)
        return routes


def add_answer(state: Tensor, mailbox: Tensor, h: Tensor, patience_seconds: float = PATIENCE_SECONDS) -> None:
    """Waits for the CPU's answer to the last question, and adds it to h, fp32 [rows, hidden]."""
    run = driver.kernel("offload.cu", "PPPPIIQ", "collect", packed=False)
    rows, hidden = h.shape
    base = mailbox.data_ptr()
    run((min(rows, 16),), 256, state, base, base + sums_at(hidden), h, rows, hidden, int(patience_seconds * 1e9))


def await_answer(mailbox: Tensor, seconds: float = PATIENCE_SECONDS) -> None:
    """Until the CPU has answered what it was asked and nobody collects: the next question would change its rows while it reads them."""
    asked, answered = (mailbox[at : at + 4].view(torch.int32) for at in (0, ANSWERED_AT))
    if mailbox.is_meta or not int(asked):
        return
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    until = time.monotonic() + seconds
    while int(asked) != int(answered) and time.monotonic() < until:
        time.sleep(0.001)


def share_tiles(blocks: int) -> int:
    """Tiles of gate and up whose outputs are so many blocks of 128: a tile has 8."""
    return blocks * 16


RUN_BYTES = 8192


def up_run(num_bytes: int, block_bytes: int) -> int:
    """Bytes of gate and up that a warp fetches at a time: whole blocks that divide them, as near to RUN_BYTES as can be."""
    blocks = num_bytes // block_bytes
    return block_bytes * min(
        (n for n in range(1, 33) if blocks % n == 0), key=lambda n: abs(n * block_bytes - RUN_BYTES), default=1
    )
