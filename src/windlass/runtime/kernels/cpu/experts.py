"""The routed feed-forward in C++ (native/ops/experts.cpp)."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from windlass.runtime.kernels.arguments import ExpertsArgs
from windlass.runtime.kernels.cpu.activate import NUMBERS
from windlass.runtime.kernels.cpu.linear import TILE_BYTES_PER_BLOCK, is_packed, matrix_data, matrix_ints
from windlass.runtime.kernels.cpu.types import is_index, is_plain
from windlass.runtime.kernels.packing.matrix import num_experts
from windlass.runtime.kernels.packing.panel_data import BLOCK
from windlass.runtime.kernels.packing.panels import Panels
from windlass.runtime.kernels.program import program

Matrix = Tensor | Panels


def experts(args: ExpertsArgs, table: Tensor | None = None, result: Tensor | None = None) -> Tensor | None:
    """`table`, int64 [experts, 2]: the address of each expert's gate and up, and of its down matrix; 0: it takes no part. `args` then only
    says what these look like. `result` may be `args.add`."""
    gate_up, down, x, add = args.gate_up, args.down, args.x, args.add
    if not isinstance(gate_up, Matrix) or not isinstance(down, Matrix):
        return None
    matrices = matrix_ints(gate_up), matrix_ints(down)
    if matrices[0] is None or matrices[1] is None or not covers(args):
        return None
    (rows, hidden), active = x.shape, args.ids.shape[1]
    result = program.empty((rows, hidden)) if result is None else result
    scratch = _scratch(rows * active, gate_up, down)
    data = (matrix_data(gate_up), matrix_data(down)) if table is None else (None, None)
    biases = args.gate_up_bias, args.down_bias
    tensors = [result, x, args.ids, args.weights, *data, *biases, add, *scratch, table]
    strides = [x.stride(0), 0 if add is None else add.stride(0)]
    ints = [*matrices[0], *matrices[1], num_experts(gate_up), active, *strides, NUMBERS[args.activation]]
    program.emit("experts", tensors, ints, [inf if args.clamp is None else args.clamp], rows=rows)
    return result


def covers(args: ExpertsArgs) -> bool:
    """Whether these inputs are supported; matrices aside."""
    whole = [tensor for tensor in (args.weights, args.gate_up_bias, args.down_bias) if tensor is not None]
    are_whole = all(tensor.is_contiguous() for tensor in whole)
    return args.x.dim() == 2 and is_plain(args.x, *whole, args.add) and is_index(args.ids) and are_whole


def _scratch(pairs: int, gate_up: Matrix, down: Matrix) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Buffers for rows of x sorted by expert, for floats between the products, and for the same as tiles (see native/panel/panel.h)."""
    hidden, width = gate_up.shape[-1], down.shape[-1]
    tile_rows = pairs * 6 // 5 + 1  # tiles of more than four rows have an even height
    if is_packed(gate_up):
        gathered = program.empty((tile_rows * (hidden // BLOCK) * TILE_BYTES_PER_BLOCK,), torch.uint8)
    else:
        gathered = program.empty((pairs, hidden))
    fused = is_packed(gate_up) and is_packed(down) and width % BLOCK == 0
    inner = None if fused else program.empty((pairs, 3 * width))
    tiles = program.empty((tile_rows * (width // BLOCK) * TILE_BYTES_PER_BLOCK,), torch.uint8) if is_packed(down) else None
    return gathered, inner, tiles
