"""Weights that are not in memory all the time: a matrix that lies in a buffer only while it is needed, and experts that are fetched.

What operations need to know of them. Who fills the buffers, and from where, is in `offload`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor


class StreamedMatrix:
    """Has a fixed address once it is bound, so that a recorded program can use it. `before` returns when it is there; `after` gives the
    buffer back."""

    def __init__(self) -> None:
        self._bound: tuple[Any, Callable[[], None], Callable[[], None]] | None = None

    def bind(self, matrix: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Once all streamed matrices are known, and with them the place of each. `matrix`: plain, packed or stacked."""
        self._bound = matrix, before, after

    @property
    def bound(self) -> tuple[Any, Callable[[], None], Callable[[], None]]:
        assert self._bound is not None, "used before it has a place"
        return self._bound

    @property
    def num_bytes(self) -> int:
        matrix = self.bound[0]
        return matrix.numel() * matrix.element_size() if isinstance(matrix, Tensor) else matrix.num_bytes


class TieredExperts(ABC):
    """Stands for the gate and up, and for the down matrices of a layer's experts."""

    num_experts: int
    num_bytes: int
    guess: Callable[[Tensor], Tensor] | None = None
    """The input of these experts to the ids that the next layer with experts will probably choose. Made of operations, so that it is recorded."""

    @abstractmethod
    def compute(self, args: Any, result: Tensor, guessed: Tensor | None = None) -> None:
        """Of an ExpertsArgs, whose `gate_up` and `down` are ignored. `guessed`: by `guess`, of the same input."""
