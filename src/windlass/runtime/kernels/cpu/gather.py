"""Row selection in C++ (native/ops/gather.cpp)."""

from __future__ import annotations

from torch import Tensor

from windlass.runtime.kernels.cpu.types import is_index, is_plain
from windlass.runtime.kernels.program import program


def gather(x: Tensor, rows: Tensor) -> Tensor | None:
    if x.dim() != 2 or not is_plain(x) or not is_index(rows):
        return None
    result = program.empty((rows.shape[0], x.shape[1]))
    program.emit("gather", [result, x, rows], [x.shape[1], x.stride(0)], rows=rows.shape[0])
    return result
