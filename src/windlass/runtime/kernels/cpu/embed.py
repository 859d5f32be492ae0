"""Embedding lookups in plain tables in C++ (native/ops/embed.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.runtime.kernels.cpu.types import STORED
from windlass.runtime.kernels.program import program

INDICES = (torch.int32, torch.int64)


def embed(tokens: Tensor, table: Tensor, positions: Tensor | None = None, position_table: Tensor | None = None) -> Tensor | None:
    """table[tokens] in fp32, plus position_table[positions] where there is one."""
    if not _covered(tokens, table) or (positions is not None and not _covered(positions, position_table)):
        return None
    rows, width = tokens.shape[0], table.shape[1]
    result = program.empty((rows, width))
    types = [STORED[table.dtype], 0 if position_table is None else STORED[position_table.dtype]]
    wide = [int(tokens.dtype == torch.int64), int(positions is not None and positions.dtype == torch.int64)]
    program.emit("embed", [result, tokens, table, positions, position_table], [width, *types, *wide], rows=rows)
    return result


def _covered(indices: Tensor, table: Tensor | None) -> bool:
    if table is None or table.dtype not in STORED or not table.is_contiguous():
        return False
    return indices.dim() == 1 and indices.dtype in INDICES and indices.is_contiguous()
