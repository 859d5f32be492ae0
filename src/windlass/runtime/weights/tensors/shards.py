"""A rank's shard of a tensor: where it is stored, and which rows and columns. Pure."""

from __future__ import annotations

from windlass.core.model import Frozen
from windlass.core.place import Interval, Placement, slices
from windlass.core.rule import Rule
from windlass.runtime.weights.tensors.readers import ModelTensor, TensorLocation


class TensorShard(Frozen, gc=False):
    tensor: ModelTensor
    location: TensorLocation
    rows: Interval
    """Elements, for a vector."""
    columns: Interval = (0, 1)

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def num_in(self) -> int:
        return self.columns[1] - self.columns[0]

    @property
    def whole_rows(self) -> bool:
        return self.num_in == self.tensor.shape[-1]


class RankShare(Frozen):
    """What a rank holds: its tp (and ep) index in a placement; without a placement, everything."""

    placement: Placement | None = None
    tp_index: int = 0
    ep_index: int | None = None
    """None: follows tp_index, for experts spread within the tp group."""

    def slices(self, rule: Rule) -> tuple[Interval, ...]:
        if self.placement is None:
            return tuple((0, size) for size in rule.shape)
        return slices(rule, self.placement, self.tp_index)

    def experts(self, num_experts: int) -> Interval:
        if self.placement is None or not self.placement.experts:
            return 0, num_experts
        tp = max((len(cut.intervals) for cut in self.placement.cuts), default=1)
        sharing = max(tp // len(self.placement.experts), 1)
        return self.placement.experts[self.tp_index // sharing if self.ep_index is None else self.ep_index]


def shard_of(tensor: ModelTensor, location: TensorLocation, held: tuple[Interval, ...]) -> TensorShard:
    """`held`: a rank's slices of the rule."""
    return TensorShard(tensor=tensor, location=location, rows=held[0], columns=held[1] if len(held) == 2 else (0, 1))
