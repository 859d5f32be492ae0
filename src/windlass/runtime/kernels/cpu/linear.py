"""Linear layers in C++ (native/ops/linear.cpp), and embedding lookups in packed tables (native/panel/put.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.runtime.kernels.cpu.types import is_plain
from windlass.runtime.kernels.packing.panel_data import BLOCK, KINDS
from windlass.runtime.kernels.packing.panels import Panels
from windlass.runtime.kernels.program import program

FLOATS = {torch.float32: len(KINDS), torch.bfloat16: len(KINDS) + 1, torch.float16: len(KINDS) + 2}
"""As `Kind` in native/panel/panel.h continues after the first packed ones."""
TILE_ROWS = 12
TILE_BYTES_PER_BLOCK = 40
PRIVATE_ROWS = 2


def matrix_ints(weight: Tensor | Panels) -> list[int] | None:
    """The integer arguments that describe the matrix (of one expert, where there are several); None: not supported."""
    if isinstance(weight, Panels):
        return weight.native_ints
    if weight.dtype not in FLOATS or not weight.is_contiguous():
        return None
    return [FLOATS[weight.dtype], 0, *weight.shape[-2:], 0]


def matrix_data(weight: Tensor | Panels) -> Tensor:
    return weight.data if isinstance(weight, Panels) else weight


def is_packed(weight: Tensor | Panels) -> bool:
    return isinstance(weight, Panels) and weight.is_packed


def tiles(rows: int, num_in: int) -> Tensor:
    """A buffer for rows of activations quantized to int8, see native/panel/panel.h."""
    padded = -(-rows // TILE_ROWS) * TILE_ROWS
    return program.empty((padded * (num_in // BLOCK) * TILE_BYTES_PER_BLOCK,), torch.uint8)


def covers(x: Tensor, bias: Tensor | None = None, add: Tensor | None = None) -> bool:
    """Whether these inputs are supported; matrices aside."""
    return x.dim() == 2 and is_plain(x, bias, add)


def linear(
    x: Tensor, weight: Tensor | Panels, bias: Tensor | None = None, add: Tensor | None = None, result: Tensor | None = None
) -> Tensor | None:
    """`result`: columns of a matrix to write to."""
    matrix = matrix_ints(weight)
    if matrix is None or not covers(x, bias, add) or len(weight.shape) != 2:
        return None
    (rows, num_in), num_out = x.shape, weight.shape[0]
    if num_in != weight.shape[1] or (add is not None and add.shape != (rows, num_out)):
        return None
    result = program.empty((rows, num_out)) if result is None else result
    scratch = tiles(rows, num_in) if is_packed(weight) and rows > PRIVATE_ROWS else None
    strides = [x.stride(0), 0 if add is None else add.stride(0), result.stride(0)]
    program.emit("linear", [result, x, matrix_data(weight), bias, add, scratch], [*matrix, *strides], rows=rows)
    return result


def embed(tokens: Tensor, table: Panels) -> Tensor | None:
    """Rows of the table in fp32."""
    if tokens.dim() != 1 or tokens.dtype not in (torch.int32, torch.int64) or not tokens.is_contiguous() or table.num_experts:
        return None
    result = program.empty((tokens.shape[0], table.shape[1]))
    ints = [*table.native_ints, tokens.element_size()]
    program.emit("panels_rows", [result, table.data, tokens], ints, rows=tokens.shape[0])
    return result
