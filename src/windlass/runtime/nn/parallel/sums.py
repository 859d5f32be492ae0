"""How a half layer's output is added to the residual stream: directly, or after an all-reduce over tensor-parallel ranks.

Only the partial outputs are reduced, not the residual, which every rank has: it is much larger in magnitude, and partial outputs may travel as
int8.
"""

from __future__ import annotations

from torch import Tensor

from windlass.runtime.kernels.ops.norm import add
from windlass.runtime.nn.parallel.collectives import recorded
from windlass.runtime.nn.parallel.training import TrainingSum
from windlass.runtime.parallel.autograd import AutogradGroup
from windlass.runtime.parallel.group import Group


class LocalSum:
    """One rank: products add the residual themselves, which saves a pass over memory."""

    def enter(self, x: Tensor) -> Tensor:
        """The input of a half layer; in training its gradient is summed over ranks."""
        return x

    def fused_residual(self, residual: Tensor) -> Tensor | None:
        """What the last product of the half layer is to add."""
        return residual

    def total(self, part: Tensor, residual: Tensor | None = None) -> Tensor:
        """The sum over ranks plus the residual, unless `fused_residual` added it."""
        return part


class ReducedSum:
    def __init__(self, group: Group) -> None:
        self._group = recorded(group)

    def enter(self, x: Tensor) -> Tensor:
        return x

    def fused_residual(self, residual: Tensor) -> Tensor | None:
        return None

    def total(self, part: Tensor, residual: Tensor | None = None) -> Tensor:
        self._group.all_reduce(part)
        return part if residual is None else add(part, residual)


Sum = LocalSum | ReducedSum | TrainingSum


def sum_over(group: Group) -> Sum:
    if group.size == 1:
        return LocalSum()
    return TrainingSum(group) if isinstance(group, AutogradGroup) else ReducedSum(group)
