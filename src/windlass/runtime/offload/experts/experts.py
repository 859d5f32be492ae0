"""Computes with experts of which only some are in memory: the missing ones are read into slots while others compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from windlass.runtime.kernels.arguments import ExpertsArgs
from windlass.runtime.kernels.cpu import experts as native
from windlass.runtime.kernels.cpu.linear import matrix_ints
from windlass.runtime.kernels.ops.experts import reference
from windlass.runtime.kernels.packing.panels import Panels
from windlass.runtime.kernels.packing.tiered import TieredExperts
from windlass.runtime.kernels.program import program
from windlass.runtime.kernels.program.reads import Priority
from windlass.runtime.offload.experts.ahead import ComingExpert, ReadsAhead
from windlass.runtime.offload.experts.cache import ExpertCache, Fetched, Ints
from windlass.runtime.offload.experts.pieces import groups, next_piece
from windlass.runtime.offload.tiers.file import TierEntry
from windlass.runtime.offload.tiers.forms import matrix_in, template
from windlass.runtime.offload.tiers.memory import page_aligned, view
from windlass.runtime.offload.tiers.reader import DirectReader, Read

Run = Callable[[list[tuple[int, int]], ExpertsArgs, Tensor], None]
"""(experts with their slots, arguments, result)"""

MOST_GUESSED_ROWS = 16
"""With more rows a layer needs most of its experts, and computes long enough to read them."""


class ExpertSlots:
    """The slots of all layers, and what fills them."""

    def __init__(self, reader: DirectReader, cache: ExpertCache, slot_bytes: int) -> None:
        self.reader, self.cache, self.slot_bytes = reader, cache, slot_bytes
        self.ahead = ReadsAhead(cache)
        self._memory = page_aligned(cache.num_slots * slot_bytes)

    def address(self, slot: int) -> int:
        return self._memory.data_ptr() + slot * self.slot_bytes

    def block(self, slot: int) -> Tensor:
        return self._memory[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]


@dataclass(frozen=True)
class LoadingGroup:
    experts: list[int]
    fetched: Fetched
    reads: dict[int, Read]
    """By expert."""


class DiskExperts(TieredExperts):
    """The experts of one layer, in an entry of the file. `layer`: its number among the layers with experts."""

    def __init__(self, layer: int, entry: TierEntry) -> None:
        self._layer, self._offset, self._block_bytes, self._forms = layer, entry.offset, entry.block_bytes, entry.forms
        self.num_experts, self.num_bytes = entry.count, entry.count * entry.block_bytes
        self._gate_up, self._down = (template(form, entry.count) for form in entry.forms)
        self._table = torch.zeros(entry.count, 2, dtype=torch.int64)
        self._addresses = self._table.numpy()
        """The same memory: setting single numbers of a tensor is slow."""
        self._bound: ExpertSlots | None = None
        self._following: DiskExperts | None = None

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    @property
    def _slots(self) -> ExpertSlots:
        assert self._bound is not None, "used before it has slots"
        return self._bound

    def bind(self, slots: ExpertSlots) -> None:
        """Once all layers are known."""
        self._bound = slots

    def foresee(self, following: DiskExperts, guess: Callable[[Tensor], Tensor]) -> None:
        """From now on, experts of the layer that comes next are read while this one computes."""
        self._following, self.guess = following, guess

    def compute(self, args: ExpertsArgs, result: Tensor, guessed: Tensor | None = None) -> None:
        if self._is_native(args):
            self._compute(args, result, self._run, guessed)
            return
        self._compute(args._replace(add=None), result.zero_(), self._run_reference, guessed)
        if args.add is not None:
            result += args.add

    def _compute(self, args: ExpertsArgs, result: Tensor, run: Run, guessed: Tensor | None) -> None:
        """Group after group in the order of experts; the next is loaded meanwhile."""
        ids = self._own(args.ids)
        coming = self._slots.ahead.take(self._layer, set(ids))
        num_slots = self._slots.cache.num_slots - len(self._slots.ahead.slots)
        waiting = groups(ids, num_slots)
        if len(waiting) > 1:
            self._settle(coming)
        if not waiting:
            run([], args, result)
        most_loading = 2 if num_slots > 1 and len(waiting) > 1 else 1
        loading: deque[LoadingGroup] = deque()
        try:
            while waiting or loading:
                while waiting and len(loading) < most_loading:
                    loading.append(self._load(waiting.pop(0), loading[-1].fetched.slots if loading else None, coming))
                if len(ids) <= num_slots:
                    self._read_ahead(guessed, loading[0].fetched.slots)
                self._compute_group(loading[0], args, result, run)
                args = args._replace(add=result)
                loading.popleft()
        except BaseException:  # a slot that was not filled must not be taken for its expert
            for read in [*coming.values(), *(read for group in loading for read in group.reads.values())]:
                read.settle()
            asked = [expert for group in loading for expert in group.experts]
            self._slots.cache.forget(self._layer, np.array([*asked, *coming], dtype=np.int64))
            raise

    def _settle(self, coming: dict[int, Read]) -> None:
        """What a later group needs may lose its slot to an earlier one: nothing may be written there any more."""
        failed = [expert for expert, read in coming.items() if not read.settle()]
        coming.clear()
        self._slots.cache.forget(self._layer, np.array(failed, dtype=np.int64))

    def _own(self, ids: Tensor) -> list[int]:
        """Experts of this rank, each once, in order."""
        found = np.unique(ids.numpy())
        return found[(found >= 0) & (found < self.num_experts)].tolist()

    def _is_native(self, args: ExpertsArgs) -> bool:
        tensors = args.x, args.weights, args.gate_up_bias, args.down_bias, args.add
        return (
            program.usable(*tensors)
            and native.covers(args)
            and all(matrix_ints(one) is not None for one in (self._gate_up, self._down))
        )

    def _load(self, experts: list[int], keep: Ints | None, coming: dict[int, Read]) -> LoadingGroup:
        """`coming`: what is being read already."""
        numbers, busy = np.array(experts, dtype=np.int64), self._slots.ahead.slots
        reads = {expert: coming.pop(expert) for expert in experts if expert in coming}
        kept = busy if keep is None else np.concatenate([busy, keep])
        fetched = self._slots.cache.fetch(self._layer, numbers, kept, num_foreseen=len(reads))
        for place in np.flatnonzero(fetched.missing).tolist():
            reads[experts[place]] = self._read(experts[place], int(fetched.slots[place]), Priority.NOW)
        return LoadingGroup(experts, fetched, reads)

    def _read(self, expert: int, slot: int, priority: Priority) -> Read:
        block = self._slots.block(slot)[: self._block_bytes]
        return self._slots.reader.read(self._offset + expert * self._block_bytes, view(block), priority)

    def _read_ahead(self, guessed: Tensor | None, in_use: Ints) -> None:
        """Begins to read what the next layer will probably need. Its own reads come first: they were begun before."""
        if self._following is not None and guessed is not None and guessed.shape[0] <= MOST_GUESSED_ROWS:
            self._following._expect(self._following._own(guessed), in_use)

    def _expect(self, experts: list[int], in_use: Ints) -> None:
        slots = self._slots
        kept = np.concatenate([in_use, slots.ahead.slots])
        if 2 * (len(experts) + len(kept)) > slots.cache.num_slots:
            return
        fetched = slots.cache.reserve(self._layer, np.array(experts, dtype=np.int64), kept)
        for place in np.flatnonzero(fetched.missing).tolist():
            slot = int(fetched.slots[place])
            slots.ahead.add(ComingExpert(self._layer, experts[place], slot, self._read(experts[place], slot, Priority.SOON)))

    def _compute_group(self, group: LoadingGroup, args: ExpertsArgs, result: Tensor, run: Run) -> None:
        """As its experts arrive."""
        start = 0
        while start < len(group.experts):
            stop = next_piece(start, [self._is_there(group, place) for place in range(len(group.experts))], self._block_bytes)
            for expert in group.experts[start:stop]:
                if expert in group.reads:
                    group.reads[expert].wait()
            placed = zip(group.experts[start:stop], group.fetched.slots[start:stop].tolist(), strict=True)
            run(list(placed), args, result)
            args, start = args._replace(add=result), stop

    def _is_there(self, group: LoadingGroup, place: int) -> bool:
        read = group.reads.get(group.experts[place])
        return read is None or read.done()

    def _run(self, placed: list[tuple[int, int]], args: ExpertsArgs, result: Tensor) -> None:
        """`result` becomes the sum of `args.add` and of these experts, given with their slots."""
        for expert, slot in placed:
            address = self._slots.address(slot)
            self._addresses[expert] = address + self._forms[0].at, address + self._forms[1].at
        native.experts(args._replace(gate_up=self._gate_up, down=self._down), self._table, result)
        self._addresses.fill(0)

    def _run_reference(self, placed: list[tuple[int, int]], args: ExpertsArgs, result: Tensor) -> None:
        """In PyTorch, expert by expert; adds to the result."""
        for expert, slot in placed:
            gate_up, down = (matrix_in(form, self._slots.block(slot)) for form in self._forms)
            biases = [None if bias is None else bias[expert : expert + 1] for bias in (args.gate_up_bias, args.down_bias)]
            ids = torch.where(args.ids == expert, 0, -1)
            alone = args._replace(ids=ids, gate_up=_stacked(gate_up), down=_stacked(down), add=None)
            result += reference(alone._replace(gate_up_bias=biases[0], down_bias=biases[1]))


def _stacked(matrix: Tensor | Panels) -> Tensor | Panels:
    """As one expert of one."""
    return matrix[None] if isinstance(matrix, Tensor) else replace(matrix, num_experts=1)
