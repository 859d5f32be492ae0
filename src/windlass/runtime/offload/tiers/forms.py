"""What a block on disk holds: one matrix, or the two of an expert. Written into the file's index, so that it can be read without a checkpoint."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from windlass.core.model import Frozen
from windlass.runtime.kernels.packing.matrix import StackedMatrix
from windlass.runtime.kernels.packing.panels import Panels

ALIGNMENT = 64
"""Of each matrix in a block, as kernels want it."""


class MatrixForm(Frozen):
    """A dense tensor, or panels (`kind`, `group`; `dtype` is that of their scales)."""

    at: int
    """Offset in the block."""
    shape: tuple[int, int]
    dtype: str
    num_bytes: int
    kind: str = ""
    group: int = 0


def form_of(matrix: Tensor | Panels, at: int = 0) -> MatrixForm:
    """Of a matrix, or of each of several experts."""
    if isinstance(matrix, Tensor):
        rows, width = matrix.shape[-2:]
        return MatrixForm(at=at, shape=(rows, width), dtype=_name(matrix.dtype), num_bytes=rows * width * matrix.element_size())
    return MatrixForm(
        at=at,
        shape=matrix.shape,
        dtype=_name(matrix.scale_dtype),
        num_bytes=matrix.expert_bytes,
        kind=matrix.kind,
        group=matrix.group,
    )


def matrix_in(form: MatrixForm, block: Tensor) -> Tensor | Panels:
    """The matrix, as it lies in a block of memory."""
    data = block[form.at : form.at + form.num_bytes]
    if form.kind:
        return Panels(form.kind, form.shape, form.group, getattr(torch, form.dtype), data)
    return data.view(getattr(torch, form.dtype)).view(form.shape)


def stacked_forms(matrix: Tensor | Panels | StackedMatrix) -> tuple[MatrixForm, ...]:
    """Of a matrix, or of each part of a stacked one."""
    made: list[MatrixForm] = []
    for part in _parts(matrix):
        end = made[-1].at + made[-1].num_bytes if made else 0
        made.append(form_of(part, -(-end // ALIGNMENT) * ALIGNMENT))
    return tuple(made)


def stacked_in(forms: tuple[MatrixForm, ...], block: Tensor) -> Tensor | Panels | StackedMatrix:
    parts = tuple(matrix_in(form, block) for form in forms)
    return parts[0] if len(parts) == 1 else StackedMatrix(parts)


def stacked_bytes(matrix: Tensor | Panels | StackedMatrix) -> tuple[memoryview, ...]:
    return tuple(matrix_bytes(part) for part in _parts(matrix))


def _parts(matrix: Tensor | Panels | StackedMatrix) -> tuple[Tensor | Panels, ...]:
    return cast("tuple[Tensor | Panels, ...]", matrix.parts) if isinstance(matrix, StackedMatrix) else (matrix,)


def template(form: MatrixForm, num_experts: int) -> Tensor | Panels:
    """Experts of this form, without data: what a kernel has to know beside their addresses."""
    if form.kind:
        nothing = torch.empty(0, dtype=torch.uint8)
        return Panels(form.kind, form.shape, form.group, getattr(torch, form.dtype), nothing, num_experts)
    return torch.empty((num_experts, *form.shape), dtype=getattr(torch, form.dtype), device="meta")


def matrix_bytes(matrix: Tensor | Panels) -> memoryview:
    data = matrix if isinstance(matrix, Tensor) else matrix.data
    return data.contiguous().view(torch.uint8).reshape(-1).numpy().data


def expert_forms(gate_up: Tensor | Panels, down: Tensor | Panels) -> tuple[MatrixForm, MatrixForm]:
    """Of an expert's block: gate and up, then down."""
    first = form_of(gate_up)
    return first, form_of(down, -(-first.num_bytes // ALIGNMENT) * ALIGNMENT)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
