"""Moves experts between device and host memory beside the steps, a few at a time (core/tiers/swaps.py chooses them).

A swap passes three stages, each begun between two steps: the promoted expert is copied to a spare slot; tables name that slot, and the
demoted expert is copied to the place in host memory that is free now; tables name this place, and the slot is the spare one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.core.tiers.swaps import Swap, choose_swaps, decayed
from windlass.runtime.kernels.cuda.tiered import DISK_PLACES, ExpertSlots
from windlass.runtime.offload.device.copies import HostExperts

EVERY_STEPS = 16
"""Between looks at the counts."""
NEVER = -1.0
"""The score of an expert that does not move: below that of any on the device."""


@dataclass
class _Moving:
    swap: Swap
    spare: int
    place: int
    """In host memory."""
    slot: int
    """Of the demoted expert."""
    event: torch.cuda.Event
    is_placed: bool = False
    """The promoted expert is in use at its new slot."""


class Promotions:
    def __init__(
        self,
        slots: ExpertSlots,
        host: list[HostExperts],
        tables: tuple[Tensor, Tensor],
        uses: Tensor,
        spare: list[int],
        staged_half: int,
    ) -> None:
        """`tables`: for steps of few and of many rows (TieredTiles), on the device. `spare`: unused slots. `staged_half`: staging slots of a layer.
        Experts on disk stay there: the cache has those of them that are used."""
        self._slots, self._host, self._spare, self._staged_half = slots, host, spare, staged_half
        self._tables, self._uses = tables, uses
        self._known = [table.cpu() for table in tables]
        self._counted, self._last = torch.empty_like(uses, device="cpu", pin_memory=True), uses.cpu().tolist()
        self._scores = [[0.0] * uses.shape[1] for _ in range(uses.shape[0])]
        self._stream, self._counting = torch.cuda.Stream(uses.device), torch.cuda.Event()
        self._is_counting, self._steps = False, 0
        self._wanted: list[Swap] = []
        self._moving: list[_Moving] = []
        self.num_promoted = 0

    def after_step(self) -> None:
        """Returns at once: what is not done yet is looked at again after the next step."""
        self._steps += 1
        for moving in [one for one in self._moving if one.event.query()]:
            self._advance(moving)
        if self._wanted and self._spare:
            self._begin(self._wanted.pop(0))
        elif self._is_counting and self._counting.query():
            self._choose()
        elif not self._is_counting and self._steps % EVERY_STEPS == 0:
            self._counted.copy_(self._uses, non_blocking=True)
            self._counting.record()
            self._is_counting = True

    def _choose(self) -> None:
        self._is_counting = False
        now = self._counted.tolist()
        counts = [[(new - old) % 2**32 for new, old in zip(*pair, strict=True)] for pair in zip(now, self._last, strict=True)]
        self._last, self._scores = now, decayed(self._scores, counts)
        busy = {one.swap.layer for one in self._moving}
        places = self._known[0][:, :-1].tolist()
        on_device = [[at >= 0 for at in row] for row in places]
        scores = [
            [NEVER if at <= -1 - DISK_PLACES else score for at, score in zip(row, scored[:-1], strict=True)]
            for row, scored in zip(places, self._scores, strict=True)
        ]
        # The look comes every few steps, and one swap is begun after a step.
        self._wanted = [swap for swap in choose_swaps(scores, on_device, EVERY_STEPS) if swap.layer not in busy]

    def _begin(self, swap: Swap) -> None:
        place, slot, spare = (
            -1 - int(self._known[0][swap.layer, swap.promoted]),
            int(self._known[0][swap.layer, swap.demoted]),
            self._spare.pop(),
        )
        host, event = self._host[swap.layer], torch.cuda.Event()
        gate_up, down, blocks = self._slots.gate_up.data[spare], self._slots.down.data[spare], host.down_share.shape[2]
        free = torch.cuda.Event()
        free.record()  # after the steps that are under way, which may read the expert that was in this slot
        with torch.cuda.stream(self._stream):
            free.wait()
            gate_up.copy_(host.gate_up[place], non_blocking=True)
            down[:, :blocks].copy_(host.down_share[place], non_blocking=True)
            down[:, blocks:].copy_(host.down[place], non_blocking=True)
            event.record()
        self._moving.append(_Moving(swap, spare, place, slot, event))

    def _advance(self, moving: _Moving) -> None:
        swap = moving.swap
        if moving.is_placed:
            whole = int(self._known[1][swap.layer, swap.demoted])
            assert whole == moving.slot
            self._set(swap.layer, swap.demoted, -1 - moving.place, self._staged(swap.layer, moving.place))
            self._spare.append(moving.slot)
            self._moving.remove(moving)
            self.num_promoted += 1
            return
        self._set(swap.layer, swap.promoted, moving.spare, moving.spare)
        moving.is_placed, moving.event = True, torch.cuda.Event()
        used = torch.cuda.Event()
        used.record()  # after the last step that may read the place in host memory
        with torch.cuda.stream(self._stream):
            used.wait()
            self._host[swap.layer].put(
                moving.place, self._slots.gate_up.data[moving.slot], self._slots.down.data[moving.slot], non_blocking=True
            )
            moving.event.record()

    def _set(self, layer: int, expert: int, at: int, whole: int) -> None:
        """In the order of the steps: those that were launched before read the old value."""
        for table, known, value in zip(self._tables, self._known, (at, whole), strict=True):
            known[layer, expert] = value
            table[layer, expert : expert + 1].fill_(value)

    def _staged(self, layer: int, place: int) -> int:
        """Where a copied layer has the expert of that place."""
        return self._slots.staging + layer % 2 * self._staged_half + place
