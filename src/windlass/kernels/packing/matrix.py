"""A weight matrix as operations take it: a plain tensor, or packed for the CPU or for a GPU."""

from __future__ import annotations

from torch import Tensor

from windlass.kernels.packing.packed_rows import PackedRows
from windlass.kernels.packing.panels import Panels
from windlass.kernels.packing.tiered import StreamedMatrix, TieredExperts

WeightMatrix = Tensor | Panels | PackedRows
"""[out, in], or [experts, out, in]"""
AnyMatrix = WeightMatrix | StreamedMatrix
AnyExperts = WeightMatrix | TieredExperts


def weight_data(weight: WeightMatrix) -> Tensor:
    """The tensor that holds its elements, packed or not: for its device and `requires_grad`."""
    return weight if isinstance(weight, Tensor) else weight.data


def num_experts(weight: WeightMatrix) -> int:
    return weight.shape[0] if isinstance(weight, Tensor) else weight.num_experts
