"""Groups as a decoder uses them: collectives are recorded with the program, as native operations or as calls to Python."""

from __future__ import annotations

from torch import Tensor

from windlass.runtime.kernels.program import program
from windlass.runtime.parallel.group import Group


class RecordedGroup:
    """Over a group without native operations: a replay returns to Python for its collectives."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def all_reduce(self, x: Tensor) -> None:
        program.call(self._group.all_reduce, x)

    def send_next(self, x: Tensor) -> None:
        program.call(self._group.send_next, x)

    def receive_previous(self, x: Tensor) -> None:
        program.call(self._group.receive_previous, x)

    def send_next_logits(self, x: Tensor, candidates: Tensor | None) -> None:
        """All of them, however few are needed."""
        self.send_next(x)

    def receive_previous_logits(self, x: Tensor, candidates: Tensor | None) -> None:
        self.receive_previous(x)


def recorded(group: Group) -> Group | RecordedGroup:
    return group if group.is_native else RecordedGroup(group)
