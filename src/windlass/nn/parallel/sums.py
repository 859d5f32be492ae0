"""How the two halves of a layer come to the stream that runs past them: whole already, or as what this rank has of a sum over all.

A rank's part travels without the stream it is added to: every rank has that, and it is the larger of the two by far, so that parts may be
rounded on their way without rounding it.
"""

from __future__ import annotations

from torch import Tensor

from windlass.kernels.ops.norm import add
from windlass.nn.parallel.collectives import recorded
from windlass.nn.parallel.training import TrainingSum
from windlass.parallel.autograd import AutogradGroup
from windlass.parallel.group import Group


class WholeSum:
    """Nothing is missing: products add the stream themselves, which saves a pass over memory."""

    def enter(self, x: Tensor) -> Tensor:
        """What a half layer is given; where ranks learn, its gradient is a sum over them."""
        return x

    def within(self, stream: Tensor) -> Tensor | None:
        """What the product itself is to add."""
        return stream

    def total(self, part: Tensor, stream: Tensor | None = None) -> Tensor:
        """The sum, once the product is there; `stream` is what `within` was asked about."""
        return part


class SharedSum:
    def __init__(self, group: Group) -> None:
        self._group = recorded(group)

    def enter(self, x: Tensor) -> Tensor:
        return x

    def within(self, stream: Tensor) -> Tensor | None:
        return None

    def total(self, part: Tensor, stream: Tensor | None = None) -> Tensor:
        self._group.all_reduce(part)
        return part if stream is None else add(part, stream)


Sum = WholeSum | SharedSum | TrainingSum


def sum_over(group: Group) -> Sum:
    if group.size == 1:
        return WholeSum()
    return TrainingSum(group) if isinstance(group, AutogradGroup) else SharedSum(group)
