"""Stand-ins, as in stand_ins.py, for the kernels of sources/offload.cu: experts in host memory or a file. The CPU answers by its own threads.

Launches are taken where they leave for the driver, so that the order of their arguments is tested too. Addresses in the mailbox are numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stand_ins import StandIns
from torch import Tensor

from windlass.runtime.kernels.cuda import driver, layout
from windlass.runtime.kernels.cuda.layout import Tiles
from windlass.runtime.kernels.cuda.tiered import (
    DISK_PLACES,
    GUESSES_AT,
    ITEM_BYTES,
    ITEMS_AT,
    MAX_GUESSES,
    ROWS_AT,
    STATE_WORDS,
    TOLD_AT,
    sums_at,
)
from windlass.runtime.offload.device.share import CpuShare

ASKED, IS_ASKED, FETCHED, TOLD, COUNTS, GUESSES, WRONG = 0, 1, 3, 4, 6, 16, 16 + 2 * MAX_GUESSES
HITS, MISSES, FORESEEN, GUESSED, RIGHT, BEGUN, LEFT_OUT = range(7)


class OffloadStandIns(StandIns):
    def __init__(self, half: torch.dtype, mailbox: Tensor, share: CpuShare | None) -> None:
        super().__init__(half)
        self._box, self._share = mailbox, share
        self.spoil: Callable[[Tensor], None] = lambda chosen: None
        """What is done to a guess: wrong ones, on purpose."""
        self.num_fetched = self.num_ahead = self.num_on_disk = 0
        """Experts; items of experts in a file."""
        self.asked_in_vain: list[int] = []
        """Layers that had nothing to ask."""

    def install(self, patch: pytest.MonkeyPatch) -> None:
        super().install(patch)
        patch.setattr(driver, "kernel", self._kernel)

    def _kernel(self, name: str, signature: str, function: str = "run", **_: Any) -> Callable[..., None]:
        assert name == "offload.cu", f"{name} was asked for, and nothing stands in for it"

        def launch(_grid: Any, _threads: int, *given: Any, dependent: bool | None = None) -> None:
            assert len(given) == len(signature)
            self.called.add(function)
            getattr(self, f"_{function}")(*given)

        return launch

    def _product(self, x: Tensor, weight: Tiles, matrix: int = 0) -> Tensor:
        if weight.num_matrices == 1:
            return super()._product(x, weight, matrix)
        return x.float() @ layout.dequantize(weight.part(matrix, matrix + 1))[0].T  # slots change

    def _words(self, at: int, count: int) -> Tensor:
        return self._box[at : at + 4 * count].view(torch.int32)

    def _place(
        self, num_items: Tensor, item_expert: Tensor, item_rows: Tensor, item_places: Tensor, weights: Tensor, x: Tensor, table: Tensor,
        uses: Tensor, totals: Tensor, state: Tensor, box: int, to_items: int, to_rows: int, chosen: Tensor | None,
        next_table: Tensor | None, rows: int, hidden: int, active: int, slots: int, staging: int, layer: int, ask: int, most: int,
        staged: int, is_made: int, first_slot: int, nothing: int,
    ) -> None:  # fmt: skip
        assert (box, to_items, to_rows) == tuple(self._box.data_ptr() + at for at in (0, ITEMS_AT, ROWS_AT))
        assert tuple(x.shape) == (rows, hidden) and most <= MAX_GUESSES
        here, then = layer % 2, (layer + 1) % 2
        count = int(state[COUNTS + here]) if is_made else 0
        guessed = {int(state[GUESSES + here * MAX_GUESSES + k]): k for k in range(count)}
        fetched: dict[int, int] = {}
        items: list[Tensor] = []
        right: set[int] = set()
        for i in range(int(num_items[0])):
            expert = int(item_expert[i])
            at, there = int(table[expert]), item_rows[i] >= 0
            number = int(there.sum())
            uses[expert] += number
            place = -1 - at
            if int(item_places[i][0]) % slots < active:
                totals[MISSES if at < 0 else HITS] += number
            if at >= 0:
                item_expert[i] = at
                continue
            if place in guessed:
                totals[FORESEEN] += number
                right.add(guessed[place])
            if place >= DISK_PLACES:
                item_expert[i] = nothing
                self.num_on_disk += 1
            elif place in guessed and staged:
                item_expert[i] = first_slot + guessed[place]
            else:
                item_expert[i] = staging + fetched.setdefault(place, len(fetched))
            if not ask and place < DISK_PLACES:
                continue
            factors = torch.zeros(8)
            for k in range(8):
                if item_rows[i, k] >= 0:
                    factors[k] = weights[item_rows[i, k], int(item_places[i, k]) % slots]
            items.append(torch.cat((torch.tensor([place, number]), item_rows[i], factors.view(torch.int32))).int())
        for place, k in fetched.items():
            state[STATE_WORDS + k] = place
        state[FETCHED] = len(fetched)
        for k in set(range(count)) - right:
            state[WRONG + here * MAX_GUESSES + k] = 1
        totals[GUESSED] += count
        totals[RIGHT] += len(right)
        totals[BEGUN] += (count - len(right)) * staged
        self._guess(state, chosen, next_table, most, then)
        state[IS_ASKED] = int(bool(items))
        if ask and chosen is not None:
            self._tell(state, layer + 1, then)
        if not items:
            self.asked_in_vain.append(layer)
        if state[IS_ASKED]:
            self._ask(torch.stack(items), x, layer, state)

    def _guess(self, state: Tensor, chosen: Tensor | None, table: Tensor | None, most: int, then: int) -> None:
        """The first choices of all rows, then the second ones, and so on."""
        found: list[int] = []
        if chosen is not None and table is not None:
            self.spoil(chosen)
            for expert in chosen.T.flatten().tolist():
                place = -1 - int(table[expert])
                if 0 <= place < DISK_PLACES and place not in found and len(found) < most:
                    found.append(place)
        state[COUNTS + then] = len(found)
        at = then * MAX_GUESSES
        state[GUESSES + at : GUESSES + at + len(found)] = torch.tensor(found, dtype=torch.int32)
        state[WRONG + at : WRONG + at + MAX_GUESSES] = 0

    def _tell(self, state: Tensor, layer: int, then: int) -> None:
        count = int(state[COUNTS + then])
        self._words(GUESSES_AT, count).copy_(state[GUESSES + then * MAX_GUESSES :][:count])
        self._words(TOLD_AT + 4, 2).copy_(torch.tensor([layer, count]))
        state[TOLD] += 1
        self._words(TOLD_AT, 1).copy_(state[TOLD : TOLD + 1])

    def _ask(self, items: Tensor, x: Tensor, layer: int, state: Tensor) -> None:
        assert self._share is not None
        self._box[ITEMS_AT : ITEMS_AT + len(items) * ITEM_BYTES].view(torch.int32).copy_(items.flatten())
        self._box[ROWS_AT : ROWS_AT + x.numel() * 2].view(torch.bfloat16).copy_(x.flatten())
        self._words(4, 3).copy_(torch.tensor([x.shape[0], len(items), layer]))
        self._share.ask()
        state[ASKED] += 1

    def _fetch(
        self, state: Tensor, host_gate_up: Tensor, host_down: Tensor, gate_up: Tensor, down: Tensor, gate_up_bytes: int, gate_up_from: int,
        down_bytes: int, down_tile: int, down_part: int, staging: int,
    ) -> None:  # fmt: skip
        del down_bytes
        for k in range(int(state[FETCHED])):
            self._copy(
                int(state[STATE_WORDS + k]),
                staging + k,
                (host_gate_up, host_down),
                (gate_up, down),
                (gate_up_bytes, gate_up_from, down_tile, down_part),
            )
            self.num_fetched += 1

    def _ahead(
        self, state: Tensor, totals: Tensor, host_gate_up: Tensor, host_down: Tensor, gate_up: Tensor, down: Tensor, gate_up_bytes: int,
        gate_up_from: int, down_bytes: int, up_run: int, down_tile: int, down_part: int, first_slot: int, parity: int,
    ) -> None:  # fmt: skip
        assert (
            (gate_up_bytes - gate_up_from) % up_run == 0
            and up_run % 16 == 0
            and down_part % 16 == 0
            and down_bytes % down_tile == 0
        )
        assert not totals[LEFT_OUT]
        for k in range(int(state[COUNTS + parity])):
            place = int(state[GUESSES + parity * MAX_GUESSES + k])
            self._copy(
                place,
                first_slot + k,
                (host_gate_up, host_down),
                (gate_up, down),
                (gate_up_bytes, gate_up_from, down_tile, down_part),
            )
            self.num_ahead += 1

    def _copy(
        self, place: int, slot: int, host: tuple[Tensor, Tensor], to: tuple[Tensor, Tensor], sizes: tuple[int, ...]
    ) -> None:
        size, first, tile, part = sizes
        assert host[0][place].numel() == size
        to[0][slot].view(-1)[first:] = host[0][place].view(-1)[first:]
        rows = to[1][slot].view(-1, tile)
        rows[:, tile - part :] = host[1][place].view(-1, part)

    def _collect(self, state: Tensor, box: int, sums: int, h: Tensor, rows: int, hidden: int, _patience: int) -> None:
        assert sums == box + sums_at(hidden)
        if state[IS_ASKED]:
            at = sums_at(hidden)
            h += self._box[at : at + rows * hidden * 4].view(torch.float32).view(rows, hidden)

    def _remap(self, num_items: Tensor, item_expert: Tensor, table: Tensor) -> None:
        for i in range(int(num_items[0])):
            item_expert[i] = table[int(item_expert[i])]
