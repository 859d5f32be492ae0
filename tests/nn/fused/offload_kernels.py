"""What kernels/cuda/sources/offload.cu does, in Python, thread by thread where the order matters; the CPU's part answers as it does a device."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from windlass.kernels.cuda.tiered import DISK_PLACES, ITEM_BYTES, TieredTiles

ASKED, IS_ASKED, FAILED, FETCHED, PLACES = 0, 1, 2, 3, 4
ITEM_ROWS = 8


class OffloadKernels:
    """`kernel` stands for `driver.kernel`."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.num_on_disk = 0

    def kernel(self, name: str, signature: str, function: str = "run", **_: Any) -> Any:
        assert name == "offload.cu", f"{name} was asked for, and nothing stands in for it"

        def launch(_grid: Any, _threads: int, *given: Any) -> None:
            assert len(given) == len(signature)
            getattr(self, function)(*given)

        return launch

    def place(
        self, num_items: Tensor, item_expert: Tensor, item_rows: Tensor, item_places: Tensor, weights: Tensor, x: Tensor, table: Tensor,
        uses: Tensor, totals: Tensor, state: Tensor, box: int, to_items: int, to_rows: int, rows: int, hidden: int, active: int, slots: int,
        staging: int, layer: int, ask: int, nothing: int,
    ) -> None:  # fmt: skip
        count, found, first = int(num_items[0]), [], []
        flat = weights.flatten()
        for i in range(count):
            expert = int(item_expert[i])
            at = int(table[expert])
            on_disk = at <= -1 - DISK_PLACES
            missing = at < 0 and not on_disk
            users = [(int(item_rows[i, k]), int(item_places[i, k]) % slots) for k in range(ITEM_ROWS) if item_rows[i, k] >= 0]
            is_shared = any(slot >= active for _, slot in users)
            uses[expert] += len(users)
            if not is_shared:
                totals[2 if on_disk else int(missing)] += len(users)
            if missing and -1 - at not in first:
                first.append(-1 - at)
            item_expert[i] = nothing if on_disk else staging + len(first) - 1 if missing else at
            if on_disk or (missing and ask):
                factors = [float(flat[row * active + slot]) if slot < active else 0.0 for row, slot in users]
                found.append((-1 - at, [row for row, _ in users], factors))
                self.num_on_disk += on_disk
        for number, place in enumerate(first):
            state[PLACES + number] = place
        state[FETCHED], state[IS_ASKED] = len(first), int(bool(found))
        if found:
            state[ASKED] += 1
            self._publish(box, to_items, to_rows, x, found, (rows, len(found), layer, int(state[ASKED])))

    def _publish(
        self,
        box: int,
        to_items: int,
        to_rows: int,
        x: Tensor,
        items: list[tuple[int, list[int], list[float]]],
        head: tuple[int, ...],
    ) -> None:
        for number, (place, users, factors) in enumerate(items):
            padding = ITEM_ROWS - len(users)
            into(to_items + number * ITEM_BYTES, np.int32)[: 2 + ITEM_ROWS] = [place, len(users), *users, *[-1] * padding]
            into(to_items + number * ITEM_BYTES + 40, np.float32)[:ITEM_ROWS] = [*factors, *[0.0] * padding]
        values = x.bfloat16().contiguous().view(torch.int16).flatten().numpy()
        into(to_rows, np.int16, len(values))[:] = values
        into(box, np.uint32)[1:4] = head[:3]
        self.num_asked += 1
        into(box, np.uint32)[0] = head[3]

    def fetch(
        self, state: Tensor, host_gate_up: Tensor, host_down: Tensor, gate_up: Tensor, down: Tensor, _gate_up_bytes: int, gate_up_from: int,
        _down_bytes: int, _down_tile: int, down_part: int, staging: int,
    ) -> None:  # fmt: skip
        for number in range(int(state[FETCHED])):
            place, slot = int(state[PLACES + number]), staging + number
            gate_up[slot].view(-1)[gate_up_from:] = host_gate_up[place].reshape(-1)[gate_up_from:]
            blocks = down_part // host_down.shape[3]
            down[slot][:, down.shape[2] - blocks :] = host_down[place]

    def collect(self, state: Tensor, box: int, sums: int, h: Tensor, rows: int, hidden: int, patience: int) -> None:
        if not int(state[IS_ASKED]):
            return
        until = time.monotonic() + patience / 1e9
        while int(into(box, np.uint32)[16]) != int(state[ASKED]):
            assert time.monotonic() < until, "hung"
            time.sleep(1e-4)
        h += torch.from_numpy(into(sums, np.float32, rows * hidden).copy()).view(rows, hidden)

    def remap(self, num_items: Tensor, item_expert: Tensor, table: Tensor) -> None:
        count = int(num_items[0])
        item_expert[:count] = table[item_expert[:count].long()]


def into(address: int, kind: Any, count: int = 32) -> Any:
    """Memory at an address."""
    size = np.dtype(kind).itemsize * count
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype=kind)


def tiles_of(decoder: Any) -> list[TieredTiles]:
    feeds = [layer.feed_forward for layer in decoder.layers]
    return [feed.gate_up for feed in feeds if isinstance(getattr(feed, "gate_up", None), TieredTiles)]
