"""A stand-in for the device that `kernels.program.loader` fills: memory of the CPU, and kernels made of the references beside the real ones."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from windlass.runtime.kernels.cuda import layout
from windlass.runtime.kernels.cuda.layout import Tiles
from windlass.runtime.kernels.program.loader import SLOTS_PER_WORKER, Functions, Slot

INT, POINTER, U32 = ctypes.c_int, ctypes.c_void_p, ctypes.c_uint
RELAXED = 2


class StandIn:
    """`late`: copies and kernels of a stream run when somebody waits for it, as late as a device may."""

    def __init__(self, slot_bytes: int, workers: int = 2, *, late: bool = False) -> None:
        self.slot_bytes, self.context, self.late = slot_bytes, 77, late
        count = workers * SLOTS_PER_WORKER
        self._pinned, self._staging = (torch.full((count * slot_bytes,), 255, dtype=torch.uint8) for _ in range(2))
        self.slots = [
            Slot(self._pinned.data_ptr() + at, self._staging.data_ptr() + at, 1000 + number)
            for number, at in enumerate(range(0, count * slot_bytes, slot_bytes))
        ]
        self.waiting: dict[int, list[Callable[[], object]]] = {slot.stream: [] for slot in self.slots}
        self.copies: list[int] = []
        self.num_repacked, self.contexts, self.modes, self.num_freed = 0, [], [], 0
        self.fails_with = 0
        self._kept = (
            ctypes.CFUNCTYPE(INT, POINTER)(self._set_context),
            ctypes.CFUNCTYPE(INT, POINTER)(self._capture_mode),
            ctypes.CFUNCTYPE(INT, ctypes.c_uint64, POINTER, ctypes.c_size_t, POINTER)(self._copy),
            ctypes.CFUNCTYPE(INT, POINTER, *(U32,) * 7, POINTER, POINTER, POINTER)(self._launch),
            ctypes.CFUNCTYPE(INT, POINTER)(self._synchronize),
        )
        self.functions = Functions(*(ctypes.cast(one, POINTER).value for one in self._kept))

    def repack(self, group: int) -> int:
        return group

    def settle(self) -> None:
        for stream in self.waiting:
            self._synchronize(stream)

    def free(self) -> None:
        self.num_freed += 1

    # --- what the driver does

    def _set_context(self, context: int) -> int:
        self.contexts.append(context)
        return 0

    def _capture_mode(self, mode: int) -> int:
        self.modes.append(INT.from_address(mode).value)
        return 0

    def _copy(self, to: int, source: int, size: int, stream: int) -> int:
        self.copies.append(size)
        self._do(stream, lambda: ctypes.memmove(to, source, size))
        return self.fails_with

    def _launch(self, group: int, *rest: Any) -> int:
        grid, threads, stream, arguments = rest[0], rest[3], rest[7], rest[8]
        places = (POINTER * 8).from_address(arguments)
        codes, scales, out, blocks = (ctypes.c_uint64.from_address(places[i]).value for i in (0, 1, 2, 7))
        rows, inputs, tile_blocks, paired = (U32.from_address(places[i]).value for i in range(3, 7))
        assert threads == 256 and grid == -(-blocks // 8)
        self.num_repacked += 1
        self._do(stream, lambda: _repack(codes, scales, out, rows, inputs, group, tile_blocks, bool(paired), blocks))
        return 0

    def _do(self, stream: int, work: Callable[[], object]) -> None:
        self.waiting[stream].append(work)
        if not self.late:
            self._synchronize(stream)

    def _synchronize(self, stream: int) -> int:
        while self.waiting[stream]:
            self.waiting[stream].pop(0)()
        return 0


def _repack(
    codes: int, scales: int, out: int, rows: int, inputs: int, group: int, tile_blocks: int, paired: bool, blocks: int
) -> None:
    count = blocks // tile_blocks // (rows // 16)
    whole = _memory(codes, count * rows * inputs // 2).view(torch.int32).view(count, rows, inputs // 8)
    scale = _memory(scales, count * rows * (inputs // group) * 2).view(torch.bfloat16).view(count, rows, inputs // group)
    shape = (count, rows // 16, tile_blocks, layout.block_bytes(group))
    place = _memory(out, count * rows // 16 * tile_blocks * layout.block_bytes(group)).view(shape)
    layout.repack(whole, scale, paired=paired, out=Tiles(place, rows, inputs, group, paired))


def _memory(address: int, size: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
