"""The routed feed-forward in C++ (native/ops/experts.cpp)."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from windlass.core.model import Activation
from windlass.kernels.cpu.activate import NUMBERS
from windlass.kernels.cpu.linear import BLOCK, TILE_BYTES_PER_BLOCK, is_packed, matrix_data, matrix_ints
from windlass.kernels.cpu.types import is_index, is_plain
from windlass.kernels.packing.panels import Panels
from windlass.kernels.program import program

Matrix = Tensor | Panels


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Matrix,
    down: Matrix,
    activation: Activation,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    clamp: float | None = None,
    add: Tensor | None = None,
) -> Tensor | None:
    matrices = matrix_ints(gate_up), matrix_ints(down)
    if matrices[0] is None or matrices[1] is None or x.dim() != 2 or not _covered(x, ids, weights, gate_up_bias, down_bias, add):
        return None
    (rows, hidden), active = x.shape, ids.shape[1]
    result = program.empty((rows, hidden))
    scratch = _scratch(rows * active, gate_up, down)
    tensors = [result, x, ids, weights, matrix_data(gate_up), matrix_data(down), gate_up_bias, down_bias, add, *scratch]
    strides = [x.stride(0), 0 if add is None else add.stride(0)]
    ints = [*matrices[0], *matrices[1], _num_experts(gate_up), active, *strides, NUMBERS[activation]]
    program.emit("experts", tensors, ints, [inf if clamp is None else clamp], rows=rows)
    return result


def _covered(x: Tensor, ids: Tensor, weights: Tensor, *others: Tensor | None) -> bool:
    whole = [tensor for tensor in (weights, *others[:2]) if tensor is not None]
    return is_plain(x, weights, *others) and is_index(ids) and all(tensor.is_contiguous() for tensor in whole)


def _num_experts(matrix: Matrix) -> int:
    return matrix.num_experts if isinstance(matrix, Panels) else matrix.shape[0]


def _scratch(pairs: int, gate_up: Matrix, down: Matrix) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Room for rows of x sorted by expert, for floats between the products, and for the same as tiles (see native/panel/panel.h)."""
    hidden, width = gate_up.shape[-1], down.shape[-1]
    tile_rows = pairs * 6 // 5 + 1  # tiles of more than four rows have an even number of them
    if is_packed(gate_up):
        gathered = program.empty((tile_rows * (hidden // BLOCK) * TILE_BYTES_PER_BLOCK,), torch.uint8)
    else:
        gathered = program.empty((pairs, hidden))
    fused = is_packed(gate_up) and is_packed(down) and width % BLOCK == 0
    inner = None if fused else program.empty((pairs, 3 * width))
    tiles = program.empty((tile_rows * (width // BLOCK) * TILE_BYTES_PER_BLOCK,), torch.uint8) if is_packed(down) else None
    return gathered, inner, tiles
