"""A weight matrix as operations take it: a plain tensor, packed for the CPU or for a GPU, or several of these stacked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from windlass.runtime.kernels.packing.packed_rows import PackedRows
from windlass.runtime.kernels.packing.panels import Panels
from windlass.runtime.kernels.packing.tiered import StreamedMatrix, TieredExperts

WeightMatrix = Tensor | Panels | PackedRows
"""[out, in], or [experts, out, in]"""


@dataclass(frozen=True)
class StackedMatrix:
    """Matrices of unlike types that share their inputs, stacked along the output. GGUF's mixtures store Q, K and V so."""

    parts: tuple[WeightMatrix, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(matrix_bytes(part) for part in self.parts)

    def columns(self) -> Iterator[tuple[WeightMatrix, slice]]:
        """Each part, and its columns of the result."""
        first = 0
        for part in self.parts:
            yield part, slice(first, first + part.shape[0])
            first += part.shape[0]


AnyMatrix = WeightMatrix | StreamedMatrix | StackedMatrix
AnyExperts = WeightMatrix | TieredExperts


def weight_data(weight: WeightMatrix) -> Tensor:
    """The tensor that holds its elements, packed or not: for its device and `requires_grad`."""
    return weight if isinstance(weight, Tensor) else weight.data


def num_experts(weight: WeightMatrix) -> int:
    return weight.shape[0] if isinstance(weight, Tensor) else weight.num_experts


def one_expert(weight: WeightMatrix, expert: int) -> WeightMatrix:
    """One matrix of several, in their memory."""
    return weight[expert] if isinstance(weight, Tensor) else weight.expert(expert)


def matrix_bytes(weight: WeightMatrix) -> int:
    return weight.numel() * weight.element_size() if isinstance(weight, Tensor) else weight.num_bytes
